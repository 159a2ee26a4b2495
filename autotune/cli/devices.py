"""Tables of the known devices and links."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hetconv.schemas.catalog import DeviceSheet, LinkSheet, load_catalog
from hetconv.schemas.cluster_profile import ACHIEVED

DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16")


def show_devices(console: Console) -> None:
    """Prints devices with memory, bandwidth and TFLOP/s by dtype, links, and their sources."""
    known = load_catalog()
    sheets: list[DeviceSheet | LinkSheet] = [
        *known.devices.values(),
        *known.links.values(),
    ]
    sources = list(dict.fromkeys(sheet.source for sheet in sheets))
    devices = _table("device", "GB", "GB/s", *DTYPES, "source")
    for name, d in known.devices.items():
        rates = [
            f"{d.flops_per_s[t] / 1e12:.4g}" if t in d.flops_per_s else "-"
            for t in DTYPES
        ]
        memory, bandwidth = f"{d.memory_bytes / 1e9:.0f}", f"{d.bytes_per_s / 1e9:.0f}"
        devices.add_row(name, memory, bandwidth, *rates, _number(sources, d.source))
    links = _table("link", "GB/s", "us", "source")
    for name, link in known.links.items():
        bandwidth, latency = (
            f"{link.bytes_per_s / 1e9:.4g}",
            f"{link.latency_s * 1e6:.0f}",
        )
        links.add_row(name, bandwidth, latency, _number(sources, link.source))
    console.print(
        "[bold]devices[/bold]: memory, its bandwidth, peak TFLOP/s by dtype\n"
    )
    console.print(devices)
    console.print("\n[bold]links[/bold]: bandwidth each way, latency\n")
    console.print(links)
    console.print(
        f"\n{known.about} A plan counts on {ACHIEVED:.0%} of the FLOP/s.\n",
        highlight=False,
    )
    for source in sources:
        console.print(
            f"{_number(sources, source)} {source}", highlight=False, markup=False
        )


def _table(name: str, *numbers: str) -> Table:
    table = Table(name, box=None, header_style="bold", pad_edge=False)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _number(sources: list[str], source: str) -> str:
    return f"{sources.index(source) + 1}."
