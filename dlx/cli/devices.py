"""`dlx devices`: what the CUDA driver and each framework see, and how a device is called on both sides."""

from __future__ import annotations

import argparse
from typing import Any

import dlx
from dlx.cli import targets
from dlx.cli.entries import amount, one_line
from dlx.cli.probe import ask
from dlx.cli.screen import Cell, Screen

__all__ = ["run"]


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Ask the driver, and with --load each framework, in processes of their own."""
    with screen.working("asking the CUDA driver"):
        driver = {"devices": [], **ask("driver")}
    seen: dict[str, dict[str, Any]] = {}
    for name in targets.installed() if arguments.load else []:
        if name != "dlx":
            with screen.working(f"importing {name}"):
                seen[name] = {"devices": [], **ask("devices", name)}
    _show_devices(driver, seen, screen)
    _show_driver(driver, screen)
    _show_failures(seen, screen)
    if not arguments.load:
        screen.line("")
        screen.line(("--load imports the frameworks and asks them too", "quiet"))
    screen.document({"driver": driver, "frameworks": seen})
    return 0


def _show_devices(driver: dict[str, Any], seen: dict[str, dict[str, Any]], screen: Screen) -> None:
    what = {"cpu": "host memory"}
    for each in driver["devices"]:
        what[f"cuda:{each['id']}"] = f"{each['name']}, {amount(each['bytes'])}"
    if driver["devices"]:
        what |= {"cuda_host": "pinned host memory", "cuda_managed": "CUDA managed memory"}
    for answer in seen.values():
        for each in answer["devices"]:
            what.setdefault(each["device"], "")
    rows: list[list[Cell]] = []
    for name, text in what.items():
        device = dlx.Device(name)
        rows.append([(name, "name"), f"({device.type}, {device.id})", text])
    screen.table(["device", "DLPack", "what"], rows)
    words: list[list[Cell]] = [
        [(each["device"], "name"), name, one_line(each["native"], 40), "yes" if each["taken"] else "no"]
        for name, answer in seen.items()
        for each in answer["devices"]
    ]
    if words:
        screen.line("")
        screen.table(["device", "framework", "its object for it", "dlx brings arrays there"], words)


def _show_driver(driver: dict[str, Any], screen: Screen) -> None:
    screen.line("")
    cause = driver.get("missing") or driver.get("broken")
    if cause:
        screen.line(("CUDA: ", "name"), one_line(cause))
        return
    screen.line(("CUDA: ", "name"), f"driver {driver['version']}, devices: {len(driver['devices'])}")
    for each in driver["devices"]:
        able = [
            word.replace("_", " ") for word in ("managed_memory", "memory_pools", "host_memory_mapped") if each[word]
        ]
        peers = f"peer access to {', '.join(each['peers'])}" if each["peers"] else "no peer access"
        screen.line(f"  cuda:{each['id']}  compute capability {each['compute_capability']}; {', '.join(able)}; {peers}")


def _show_failures(seen: dict[str, dict[str, Any]], screen: Screen) -> None:
    for name, answer in seen.items():
        if "broken" in answer:
            screen.line((f"{name}: {one_line(answer['broken'])}", "bad"))
