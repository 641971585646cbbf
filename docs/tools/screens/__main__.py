"""Draw the screens of the documentation: ``python -m screens docs/screens`` writes one SVG for each.

Each command runs as on a terminal of 80 columns.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import sys
import tempfile
from math import prod
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text

from dlx._support.screen import Screen
from dlx.cli.arguments import build_parser

SCREENS = {
    "inspect": "inspect model.safetensors --to torch,numpy",
    "plan": "plan images.npy --to numpy,torch,jax,tvm_ffi,pyarrow,dlx",
    "matrix": "matrix --from torch --to dlx,numpy,jax,tvm_ffi,pyarrow",
}
COLUMNS = 80


def write_model(path: Path) -> None:
    """Write a .safetensors file with the names and shapes of a language model; its data is a hole in the file."""
    tensors = {"model.embed_tokens.weight": ("BF16", (32000, 4096))}
    square, wide, high = (4096, 4096), (11008, 4096), (4096, 11008)
    for layer in range(32):
        for name, shape in {
            "input_layernorm": (4096,),
            "mlp.down_proj": high,
            "mlp.gate_proj": wide,
            "mlp.up_proj": wide,
            "post_attention_layernorm": (4096,),
            **{f"self_attn.{each}_proj": square for each in "koqv"},
        }.items():
            dtype = "F32" if len(shape) == 1 else "F8_E4M3"
            tensors[f"model.layers.{layer}.{name}.weight"] = (dtype, shape)
    tensors |= {"model.norm.weight": ("F32", (4096,)), "lm_head.weight": ("F4", (32000, 4096))}
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, bits = end, {"F32": 32, "BF16": 16, "F8_E4M3": 8, "F4": 4}[dtype]
        end += prod(shape) * bits // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    raw += b" " * (-len(raw) % 8)  # as safetensors does
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + end)


def write_images(path: Path) -> None:
    """Write a .npy file of float64 in Fortran order."""
    shape = (60000, 28, 28)
    header = f"{{'descr': '<f8', 'fortran_order': True, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    path.write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
    os.truncate(path, path.stat().st_size + prod(shape) * 8)


def draw_screen(command: str) -> str:
    """Run a command and return its screen as an SVG with a light and a dark style."""
    console = Console(
        record=True, width=COLUMNS, force_terminal=True, color_system="standard", file=io.StringIO(),
        highlight=False, markup=False, emoji=False,
    )  # fmt: skip
    arguments = build_parser().parse_args(command.split())
    command_module = importlib.import_module(f"dlx.cli.commands.{arguments.module}")
    shown = io.StringIO()
    command_module.run(arguments, Screen(arguments.command, file=shown, width=COLUMNS))
    console.print(Text.from_ansi(shown.getvalue()), end="")
    light, dark = (
        _clean(console.export_svg(title=f"dlx {command}", theme=theme, clear=False, unique_id="dlx"))
        for theme in (DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME)
    )
    changed = [line for line in _style(dark) if line not in _style(light)]
    return light.replace("</style>", f"@media (prefers-color-scheme: dark) {{\n{chr(10).join(changed)}\n}}\n</style>")


def _clean(svg: str) -> str:
    """Remove web fonts, and set the colours of background and title by the style."""
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code", "'DejaVu Sans Mono', Menlo, Consolas")
    ground = re.search(r'<rect fill="(#\w+)" stroke', svg)
    assert ground is not None
    svg = svg.replace(ground[0], '<rect class="ground" stroke', 1)
    svg = svg.replace("</style>", f".ground {{ fill: {ground[1]} }}\n</style>", 1)
    # rich clips the descenders of the last line.
    svg = re.sub(
        r'(<clipPath id="dlx-clip-terminal">\s*<rect [^>]*height=")([\d.]+)',
        lambda found: f"{found[1]}{float(found[2]) + 6:.1f}",
        svg,
    )
    title = re.search(r'<text class="dlx-title" fill="(#\w+)"', svg)
    assert title is not None
    svg = svg.replace(title[0], '<text class="dlx-title"', 1)
    return (
        "\n".join(line.strip() for line in svg.splitlines() if line.strip()).replace(
            "</style>", f".dlx-title {{ fill: {title[1]} }}\n</style>", 1
        )
        + "\n"
    )


def _style(svg: str) -> list[str]:
    return svg.partition("<style>")[2].partition("</style>")[0].splitlines()


def main() -> int:
    """Write every screen."""
    target = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_model(Path("model.safetensors"))
        write_images(Path("images.npy"))
        for name, command in SCREENS.items():
            (target / f"{name}.svg").write_text(draw_screen(command), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
