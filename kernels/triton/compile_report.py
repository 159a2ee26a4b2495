"""Registers, spills, memory and instructions of a compiled launch, without a GPU."""

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
from hetconv.kernels.launch import Launch

TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
FLOAT32_TENSORS = frozenset(
    "partial scale shift mean var invstd moments sums factor_x factor_g summand".split()
)
"""Tensors of this data type whatever that of the images."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Report:
    """What the compiler made of a launch, per thread and per program.

    Attributes:
        registers: Registers of a thread.
        spills: Instructions that move registers to or from local memory.
        shared: Bytes of shared memory.
        wgmma: Hopper's tensor core instructions.
        mma: Other tensor core instructions.
        left: Those of wgmma whose left operand comes from registers, which within a
            pipelined loop gives results that differ from call to call (Triton 3.6 to
            3.9).
        copies: Loads by TMA.
        loads_128: Loads of 16 bytes into registers.
        loads_narrow: Other loads into registers.
        stores_128: Stores of 16 bytes.
        stores_narrow: Other stores.
        instructions: All instructions.
        loop: Instructions of the main loop, from the target of its branch to the
            branch, or 0 where there is none.
    """

    registers: int
    spills: int
    shared: int
    wgmma: int
    mma: int
    left: int
    copies: int
    loads_128: int
    loads_narrow: int
    stores_128: int
    stores_narrow: int
    instructions: int
    loop: int


def report(launch: Launch, dtype: str, arch: int) -> Report:
    """Compiles a launch, without a GPU.

    Args:
        launch: The launch.
        dtype: PyTorch's name of the tensors' data type.
        arch: Compute capability, 90 for 9.0.

    Raises:
        KernelError: The process runs Triton's interpreter, which compiles nothing.
    """
    if not isinstance(launch.kernel, triton.JITFunction):
        raise KernelError(
            "nothing is compiled under TRITON_INTERPRET=1; unset it and start a new process"
        )
    kernel = triton.compile(
        source(launch, dtype),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": launch.warps, "num_stages": launch.stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        usage, sass = (_tool(option, f.name) for option in ("-res-usage", "-sass"))
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None
    loads, stores = (_wide_and_narrow(sass, name) for name in ("LDG", "STG"))
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
        loads_128=loads[0],
        loads_narrow=loads[1],
        stores_128=stores[0],
        stores_narrow=stores[1],
        instructions=len(code),
        loop=_loop(code),
    )


def _wide_and_narrow(sass: str, name: str) -> tuple[int, int]:
    """How many loads or stores of that name move 16 bytes a thread, and how many less."""
    found = re.findall(rf"\b{name}\.\S+", sass)
    wide = sum(".128" in instruction for instruction in found)
    return wide, len(found) - wide


def left_in_registers(ptx: str) -> int:
    """Returns how many of Hopper's tensor core instructions take a left operand in registers.

    That is one after the list of results that is a list of registers too.
    """
    instructions = re.findall(r"wgmma\.mma_async[^;]*;", ptx)
    return sum(bool(re.search(r"\},\s*\{", text)) for text in instructions)


def _loop(code: list[tuple[int, str]]) -> int:
    """Instructions of the loop with the most products, of several the shortest.

    Other loops wait for a copy, from out of line, or sum what is left of a loop that was
    unrolled.
    """
    tensor = any(re.search(r"\bH(G)?MMA\b", text) for _, text in code)
    product = re.compile(r"\bH(G)?MMA\b" if tensor else r"\bFFMA\b")
    found = []
    for address, text in code:
        branch = re.search(r"\bBRA\b.*?\b0x([0-9a-f]+)", text)
        start = int(branch[1], 16) if branch else address
        if start < address:
            body = [t for a, t in code if start <= a <= address]
            found.append((sum(bool(product.search(t)) for t in body), -len(body)))
    products, length = max(found, default=(0, 0))
    return -length if products else 0


def source(launch: Launch, dtype: str) -> ASTSource:
    """Returns a launch as the compiler takes it, specialized as Triton would at run time.

    Args:
        launch: The launch.
        dtype: PyTorch's name of the tensors' data type.
    """
    names: list[str] = launch.kernel.arg_names
    constants: dict[tuple[int, ...], Any] = {
        (names.index(n),): v for n, v in launch.constants.items()
    }
    aligned: list[tuple[int, ...]] = []

    def typed(at: tuple[int, ...], name: str, value: int | str) -> str:
        if value == 1:
            constants[at] = 1
            return "constexpr"
        if name not in launch.descriptors and (
            isinstance(value, str) or value % 16 == 0
        ):
            aligned.append(at)
        return _type(launch, name, value, dtype)

    signature: dict[str, Any] = dict.fromkeys(names, "constexpr")
    given: dict[str, Any] = {**launch.tensors, **launch.scalars}
    for name, value in given.items():
        i = names.index(name)
        if isinstance(value, tuple):
            signature[name] = tuple(typed((i, j), name, v) for j, v in enumerate(value))
        else:
            signature[name] = typed((i,), name, value)
    attrs = {at: [["tt.divisibility", 16]] for at in aligned}
    return ASTSource(
        fn=launch.kernel, signature=signature, constexprs=constants, attrs=attrs
    )


def _type(launch: Launch, name: str, value: int | str, dtype: str) -> str:
    if isinstance(value, int):
        return "i32" if value < 2**31 else "i64"
    kind = "fp32" if value in FLOAT32_TENSORS else TYPES[dtype]
    if name in launch.descriptors:
        return (
            f"tensordesc<{kind}[{','.join(map(str, launch.descriptors[name].block))}]>"
        )
    return f"*{kind}"


def _tool(option: str, path: str) -> str:
    done = subprocess.run(
        [TOOLS / "cuobjdump", option, path], capture_output=True, text=True, check=True
    )
    return done.stdout
