"""File signatures of supported formats, and of known formats that dlx cannot read, with advice for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from dlx._support.text import one_line
from dlx.errors import FileError

SIGNATURE_BYTES = 512  # bytes read from the start of a file
HDF5 = b"\x89HDF\r\n\x1a\n"

SUPPORTED = {b"\x93NUMPY": ".npy", b"ARROW1": ".arrow", b"PAR1": ".parquet", b"GGUF": ".gguf", HDF5: "HDF5"}
"""Signatures of formats that dlx reads or lists."""

_EXPAND = "Extract it and open the result: {} FILE."
OPEN_ARRAYS = "Open a file of arrays, such as .npy, .npz, .safetensors or .gguf."
_AGAIN = "Download it again: curl -fL -o FILE URL, with a token if the server requires one."
_ELSEWHERE = "Read it with {} and convert the arrays."
_GGML = "it is a ggml model from before GGUF", "Convert it with llama.cpp: convert_llama_ggml_to_gguf."

# (offset, bytes, or a match at the start; reason; fix). Patterns are compiled at their first use.
_OTHERS: tuple[tuple[int, bytes | Callable[[bytes], object], str, str], ...] = (
    (0, b"version https://git-lfs.github.com/", "it is a Git LFS pointer, not the file itself", "Run: git lfs pull."),
    (0, b"/annex/objects/", "it is a git-annex pointer, not the file itself", "Run: git annex get FILE."),
    (0, partial(re.match, rb"(md5: |outs:|frozen: )"), "it is a DVC pointer, not the file itself",
     "Run: dvc pull FILE."),
    (0, partial(re.match, rb"\s*(<!--.*?-->\s*)*<(!doctype\s+html|html|head|body)\b", flags=re.I | re.S),
     "it is a web page (HTML), not the file itself", _AGAIN),
    (0, partial(re.match, rb"(\xef\xbb\xbf)?\s*<(\?xml|Error>)"), "it is XML, possibly a server's error message",
     _AGAIN),
    (0, partial(re.match, rb'\s*\{.*"weight_map"\s*:', flags=re.S), "it is the index of a checkpoint in another format",
     "Open its files one by one."),
    (0, partial(re.match, rb'\s*\{\s*"(errors?|message|detail|code|status)"\s*:'), "it is a server's error message",
     _AGAIN),
    (0, b"\x1f\x8b", "it is compressed with gzip", _EXPAND.format("gzip -dk")),
    (0, b"\x28\xb5\x2f\xfd", "it is compressed with Zstandard", _EXPAND.format("zstd -d")),
    (0, b"\xfd7zXZ\0", "it is compressed with xz", _EXPAND.format("xz -dk")),
    (0, partial(re.match, rb"BZh[1-9]1AY&SY"), "it is compressed with bzip2", _EXPAND.format("bzip2 -dk")),
    (0, b"\x04\x22\x4d\x18", "it is compressed with LZ4", _EXPAND.format("lz4 -d")),
    (257, b"ustar", "it is a tar archive", _EXPAND.format("tar -xf")),
    (0, b"7z\xbc\xaf\x27\x1c", "it is a 7z archive", _EXPAND.format("7z x")),
    (0, b"Rar!\x1a\x07", "it is a RAR archive", _EXPAND.format("unrar x")),
    (0, b"FEA1", "it is a Feather file of version 1",
     "Save it as version 2: pyarrow.feather.write_feather(pyarrow.feather.read_table(path), NEW)."),
    (0, b"PARE", "it is an encrypted Parquet file", _ELSEWHERE.format("pyarrow.parquet, with its keys")),
    (0, b"ORC", "it is an ORC file", _ELSEWHERE.format("pyarrow.orc.read_table")),
    (0, b"Obj\x01", "it is an Avro file", _ELSEWHERE.format("fastavro")),
    (0, b"MATLAB 5.0 MAT-file", "it is a MATLAB file from before version 7.3", _ELSEWHERE.format("scipy.io.loadmat")),
    (0, partial(re.match, rb"CDF[\1\2\5]"), "it is a netCDF file from before version 4",
     _ELSEWHERE.format("xarray.open_dataset")),
    (0, b"\x0e\x03\x13\x01", "it is an HDF4 file, not HDF5", _ELSEWHERE.format("pyhdf")),
    (0, b"SIMPLE  =", "it is a FITS file", _ELSEWHERE.format("astropy.io.fits")),
    (128, b"DICM", "it is a DICOM file", _ELSEWHERE.format("pydicom")),
    (4, b"TFL3", "it is a TensorFlow Lite model", _ELSEWHERE.format("tensorflow.lite.Interpreter")),
    (0, partial(re.match, rb"(model_checkpoint_path|all_model_checkpoint_paths): "), "it is a TensorFlow checkpoint",
     _ELSEWHERE.format("tensorflow.train.load_checkpoint(FOLDER)")),
    (0, b"lmgg", *_GGML),
    (0, b"tjgg", *_GGML),
    (0, b"fmgg", *_GGML),
    (0, b"SQLite format 3\0", "it is an SQLite database", "Read it with sqlite3."),
    (0, partial(re.match, rb"(\x89PNG\r\n|\xff\xd8\xff|GIF8|II\*\0|MM\0\*|BM.{4}\0\0\0\0|RIFF.{4}WEBP)", flags=re.S),
     "it is an image", "Read it with Pillow: dlx.convert(numpy.asarray(PIL.Image.open(path)), to=...)."),
    (0, partial(re.match, rb"(RIFF.{4}WAVE|fLaC|OggS|ID3)", flags=re.S), "it is an audio file",
     _ELSEWHERE.format("soundfile")),
    (0, b"%PDF-", "it is a PDF document", OPEN_ARRAYS),
    (0, b"\x7fELF", "it is a program or a library", OPEN_ARRAYS),
)  # fmt: skip

# (a characteristic member of the archive; reason; fix)
_ZIPS = (
    ("archive_format", "it is a torch.export program with its weights",
     "Read its weights: dlx.convert(torch.export.load(path).state_dict, to=...)."),
    ("model.weights.h5", "it is a Keras 3 model", "Extract it (unzip FILE) and open its model.weights.h5."),
    ("saved_model.pb", "it is a TensorFlow model in a zip file", "Read it with tensorflow.saved_model.load."),
    *((name, "it is a Zarr store in a zip file", "Extract it (unzip FILE -d FOLDER) and open the folder.")
      for name in ("zarr.json", ".zgroup", ".zarray")),
    ("[Content_Types].xml", "it is an office document", OPEN_ARRAYS),
    ("META-INF/MANIFEST.MF", "it is a Java archive", OPEN_ARRAYS),
)  # fmt: skip

# (a characteristic member of the folder; reason; fix)
_FOLDERS = (
    ("saved_model.pb", "it is a TensorFlow SavedModel", _ELSEWHERE.format("tensorflow.saved_model.load")),
    ("manifest.ocdbt", "it is an Orbax checkpoint", _ELSEWHERE.format("orbax.checkpoint")),
)  # fmt: skip


def identify_file(start: bytes) -> FileError | None:
    """Return the error for a file of a known, unsupported format, by its first bytes; None for other files."""
    for offset, signature, found, fix in _OTHERS:
        if start.startswith(signature, offset) if isinstance(signature, bytes) else signature(start):
            return FileError(found, fix=fix)
    if not start.strip(b"\0"):
        reason = f"its first {len(start)} bytes are 0, as in an incomplete download"
        return FileError(reason, fix="Save or download it again.")
    try:
        text = start.decode("utf-8", "strict" if len(start) < SIGNATURE_BYTES else "ignore")
    except UnicodeDecodeError:
        return None
    if all(each.isprintable() or each in "\t\n\r\f" for each in text):
        kind = "JSON" if text.lstrip()[:1] in ("{", "[") else "text"
        return FileError(f"it is {kind} that begins with {one_line(text.strip(), 40)!r}", fix=OPEN_ARRAYS)
    return None


def identify_folder(path: Path) -> FileError | None:
    """Return the error for a folder that is a store or model of another library; None for other folders."""
    for member, found, fix in _FOLDERS:
        if (path / member).exists():
            return FileError(found, fix=fix)
    return None


def identify_zip(names: Sequence[str]) -> FileError:
    """Return the error for a zip file without arrays, by the names of its members."""
    for member, found, fix in _ZIPS:
        if any(name == member or name.endswith(f"/{member}") for name in names):
            return FileError(found, fix=fix)
    found = one_line(", ".join(names[:3]), 80) or "nothing"
    reason = f"it is a zip file without arrays; it contains {found}{', ...' if len(names) > 3 else ''}"
    return FileError(reason, fix=OPEN_ARRAYS)
