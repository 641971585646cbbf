"""`dlx devices`: show the devices of the CUDA driver and of each framework, and their names in both."""

from __future__ import annotations

import argparse
import textwrap
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from dlx._core.driver import format_device, format_memory, format_version
from dlx._core.types import Device
from dlx._support.screen import Cell, Screen
from dlx._support.text import one_line
from dlx.cli import targets
from dlx.cli.model import BadInput
from dlx.cli.probe import ask

AT_ONCE = 4  # frameworks imported at the same time


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Query the driver and the frameworks, each in a separate process."""
    names = [] if arguments.driver else _frameworks(arguments.names)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = {pool.submit(ask, "driver"): ""} | {pool.submit(ask, "devices", name): name for name in names}
        for _ in screen.progress(as_completed(asked), "querying the driver and the frameworks", len(asked)):
            pass
    frameworks = {name: {"devices": [], **future.result()} for future, name in asked.items()}
    driver = frameworks.pop("")
    _show_devices(driver, frameworks, screen)
    _show_driver(driver, screen)
    for name, answer in frameworks.items():
        if "broken" in answer:
            screen.line((f"{name}: {one_line(answer['broken'])}", "bad"))
        elif not answer["devices"]:
            screen.line((f"{name}: it sees no device", "quiet"))
    screen.document({"driver": driver, "frameworks": frameworks})
    return 0


def _frameworks(names: list[str]) -> list[str]:
    installed = [name for name in targets.installed_targets() if name != "dlx"]
    for name in names:
        if name not in installed:
            raise BadInput(f"{one_line(name)!r} is not an installed framework. Installed: {', '.join(installed)}")
    return names or installed


def _show_devices(driver: dict[str, Any], seen: dict[str, dict[str, Any]], screen: Screen) -> None:
    what = {"cpu": "host memory"}
    for each in driver["devices"]:
        what[each["device"]] = format_memory(each)
    if driver["devices"]:
        what["cuda_host"] = "pinned host memory"
    if any(each["managed_memory"] for each in driver["devices"]):
        what["cuda_managed"] = "CUDA managed memory"
    for answer in seen.values():
        for each in answer["devices"]:
            what.setdefault(each["device"], "")
    rows: list[list[Cell]] = [[(name, "name"), str(tuple(Device(name))), text] for name, text in what.items()]
    screen.table(["device", "DLPack", "what"], rows)
    words: list[list[Cell]] = []
    for name, answer in seen.items():
        for each in answer["devices"]:
            direction = "to and from" if each["taken"] else ("from only", "warn")
            words.append([(each["device"], "name"), name, one_line(each["native"], 60), direction])
    if words:
        screen.line("")
        screen.table(["device", "framework", "its own object", "dlx.convert"], words)


def _show_driver(driver: dict[str, Any], screen: Screen) -> None:
    screen.line("")
    cause = driver.get("missing") or driver.get("broken")
    if cause:
        for number, line in enumerate(textwrap.wrap(one_line(cause), 74)):
            screen.line(("" if number else "CUDA: ", "name"), f"      {line}" if number else line)
        if driver.get("missing"):
            screen.line(("if there is one: set DLX_CUDA_DRIVER to the path of its libcuda.so.1", "quiet"))
        return
    screen.line(("CUDA: ", "name"), f"{format_version(driver)}, devices: {len(driver['devices'])}")
    screen.facts([(each["device"], format_device(each)) for each in driver["devices"]])
