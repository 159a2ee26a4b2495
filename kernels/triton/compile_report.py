"""What the compiler makes of a launch, for a chip that need not be here: registers,
spills, memory, instructions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hetconv.errors import KernelError
from hetconv.kernels.launch import Recipe

TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
FLOATS = ("partial", "scale", "shift")  # tensors in float32 whatever the dtype
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Report:
    """Per thread and per program. ``spills``: instructions that move registers to or
    from local memory.

    ``wgmma`` and ``mma``: tensor core instructions; ``left``: those of the former whose
    left operand comes from registers, which within a pipelined loop gives results that
    differ from call to call (Triton 3.6 to 3.9). ``copies``: by the copy engine;
    ``stores`` of 16 bytes and others; ``loop``: instructions of the main loop, from the
    target of its branch to the branch, or 0 where there is none.
    """

    registers: int
    spills: int
    shared: int
    wgmma: int
    mma: int
    left: int
    copies: int
    stores_128: int
    stores_narrow: int
    instructions: int
    loop: int


def report(recipe: Recipe, dtype: str, arch: int) -> Report:
    """Compiles a launch on tensors of ``dtype`` for compute capability ``arch`` (90 for
    9.0), without a GPU.

    Raises `KernelError` in a process that runs Triton's interpreter, which compiles nothing.
    """
    if not isinstance(recipe.kernel, triton.JITFunction):
        raise KernelError(
            "nothing is compiled under TRITON_INTERPRET=1; unset it and start a new process"
        )
    kernel = triton.compile(
        source(recipe, dtype),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": recipe.warps, "num_stages": recipe.stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        usage, sass = (_tool(option, f.name) for option in ("-res-usage", "-sass"))
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None
    stores = re.findall(r"\bSTG\.\S+", sass)
    wide = sum(".128" in s for s in stores)
    code = [
        (int(a, 16), text)
        for a, text in re.findall(r"^\s+/\*([0-9a-f]{4,5})\*/(.*?);", sass, re.M)
    ]
    counts = {
        name: len(re.findall(rf"\b{name}\b", sass))
        for name in ("STL", "LDL", "HGMMA", "HMMA", "UTMALDG")
    }
    return Report(
        registers=int(registers[1]),
        spills=counts["STL"] + counts["LDL"],
        shared=kernel.metadata.shared,
        wgmma=counts["HGMMA"],
        mma=counts["HMMA"],
        left=left_in_registers(kernel.asm["ptx"]),
        copies=counts["UTMALDG"],
        stores_128=wide,
        stores_narrow=len(stores) - wide,
        instructions=len(code),
        loop=_loop(code),
    )


def left_in_registers(ptx: str) -> int:
    """Hopper's tensor core instructions whose left operand, after the list of results,
    is a list of registers too.
    """
    return sum(
        bool(re.search(r"\},\s*\{", text))
        for text in re.findall(r"wgmma\.mma_async[^;]*;", ptx)
    )


def _loop(code: list[tuple[int, str]]) -> int:
    """Instructions of the shortest run from the target of a branch backwards to it that
    holds the most products.

    Others wait for a copy, from out of line, or sum what is left of a loop that was unrolled.
    """
    tensor = any(re.search(r"\bH(G)?MMA\b", text) for _, text in code)
    product = re.compile(r"\bH(G)?MMA\b" if tensor else r"\bFFMA\b")
    found = []
    for at, text in code:
        branch = re.search(r"\bBRA\b.*?\b0x([0-9a-f]+)", text)
        if branch and int(branch[1], 16) < at:
            body = [t for a, t in code if int(branch[1], 16) <= a <= at]
            found.append((sum(bool(product.search(t)) for t in body), -len(body)))
    products, length = max(found, default=(0, 0))
    return -length if products else 0


def source(recipe: Recipe, dtype: str) -> ASTSource:
    """A launch as the compiler takes it, specialized on its integers as a launch would be."""
    names: list[str] = recipe.kernel.arg_names
    constants: dict[tuple[int, ...], Any] = {
        (names.index(n),): v for n, v in recipe.constants.items()
    }
    aligned: list[tuple[int, ...]] = []

    def typed(at: tuple[int, ...], name: str, value: int | str) -> str:
        if value == 1:
            constants[at] = 1
            return "constexpr"
        if name not in recipe.descriptors and (
            isinstance(value, str) or value % 16 == 0
        ):
            aligned.append(at)
        return _type(recipe, name, value, dtype)

    signature: dict[str, Any] = dict.fromkeys(names, "constexpr")
    given: dict[str, Any] = {**recipe.tensors, **recipe.scalars}
    for name, value in given.items():
        i = names.index(name)
        if isinstance(value, tuple):
            signature[name] = tuple(typed((i, j), name, v) for j, v in enumerate(value))
        else:
            signature[name] = typed((i,), name, value)
    attrs = {at: [["tt.divisibility", 16]] for at in aligned}
    return ASTSource(
        fn=recipe.kernel, signature=signature, constexprs=constants, attrs=attrs
    )


def _type(recipe: Recipe, name: str, value: int | str, dtype: str) -> str:
    if isinstance(value, int):
        return "i32" if value < 2**31 else "i64"
    kind = "fp32" if value in FLOATS else TYPES[dtype]
    if name in recipe.descriptors:
        return (
            f"tensordesc<{kind}[{','.join(map(str, recipe.descriptors[name].block))}]>"
        )
    return f"*{kind}"


def _tool(option: str, path: str) -> str:
    done = subprocess.run(
        [TOOLS / "cuobjdump", option, path], capture_output=True, text=True, check=True
    )
    return done.stdout
