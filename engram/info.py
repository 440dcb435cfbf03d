"""What `engram info` says about this machine: everything a bug report or a result file needs.

    engram info --json

Amounts are bytes in the result and GiB or MiB in the table.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from engram import __version__
from engram.kernels import dispatch

PACKAGES = ("torch", "transformers", "triton", "numpy", "safetensors", "tokenizers", "datasets", "accelerate")


def machine() -> dict[str, Any]:
    """Versions, devices, memory in bytes, the pin limit in bytes (None: no limit) and the kernels in use."""
    memory = psutil.virtual_memory()
    return {
        "engram": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": {"model": _cpu_model(), "cores": _cores(), "threads": torch.get_num_threads()},
        "memory": {"total": memory.total, "available": memory.available},
        "pin_limit": _pin_limit(),
        "devices": _devices(),
        "cuda": torch.version.cuda,
        "kernels": dispatch.backend(),
    }


def foreign_seconds() -> float:
    """Seconds, summed over all cores, that they were busy for anything but this process: look at its growth."""
    cores, own = psutil.cpu_times(), psutil.Process().cpu_times()
    busy = sum(getattr(cores, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
    return float(busy - own.user - own.system)


def print_machine(result: dict[str, Any]) -> None:
    """The result of `machine` as a table."""
    table = Table(show_header=False, title="engram info")
    packages = result["packages"]
    limit = result["pin_limit"]
    table.add_row("engram", result["engram"])
    table.add_row("python", f"{result['python']} on {result['system']}")
    for name, found in packages.items():
        table.add_row(name, found or "not installed")
    cpu = result["cpu"]
    table.add_row("CPU", f"{cpu['model']}, {cpu['cores']} cores, {cpu['threads']} compute threads")
    table.add_row("memory", f"{_gib(result['memory']['available'])} free of {_gib(result['memory']['total'])}")
    table.add_row("pin limit", "none" if limit is None else f"{_gib(limit)} (ulimit -l)")
    for device in result["devices"]:
        table.add_row(device["name"], f"{device['model']}, {_gib(device['memory'])}, {device['architecture']}")
    if not result["devices"]:
        table.add_row("accelerators", "none")
    table.add_row("kernels", result["kernels"])
    Console().print(table)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cores() -> int:
    """Cores this process may use, which a container can limit below the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _pin_limit() -> int | None:
    """Bytes of memory this process may lock (`ulimit -l`), or None without a limit."""
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _devices() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        amd = getattr(about, "gcnArchName", "") if torch.version.hip else ""
        architecture = amd or f"sm_{about.major}{about.minor}"
        found.append(
            {"name": f"cuda:{index}", "model": about.name, "memory": about.total_memory, "architecture": architecture}
        )
    if torch.backends.mps.is_available():
        total = psutil.virtual_memory().total
        found.append({"name": "mps", "model": "Apple GPU", "memory": total, "architecture": "shared memory"})
    return found


def _gib(amount: int) -> str:
    return f"{amount / 2**30:.1f} GiB" if amount >= 2**28 else f"{amount / 2**20:.1f} MiB"
