"""Compiles guard.cpp and loads it, before torch is imported: torch asks once whether there is CUDA."""

import ctypes
import importlib.metadata
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path


def compiler() -> str:
    """The C++ compiler's name."""
    return os.environ.get("CXX", "c++")


def compiled() -> Path | None:
    """The library where it is built and newer than its source."""
    library, source = _library(), Path(__file__).with_name("guard.cpp")
    return library if library.is_file() and library.stat().st_mtime >= source.stat().st_mtime else None


def _library() -> Path:
    version = importlib.metadata.version("torch")
    return Path(tempfile.gettempdir()) / f"draftsmith-pretend-cuda-{os.getuid()}-{version}.so"


def load() -> None:
    """From now on, torch believes that there are two CUDA devices. Needs a C++ compiler: `c++`, or what $CXX names."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    torch = Path(spec.submodule_search_locations[0])
    library, source = _library(), Path(__file__).with_name("guard.cpp")
    if compiled() is None:
        aside = library.with_suffix(f".{os.getpid()}")
        include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        link = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
        command = [compiler(), "-O0", "-shared", "-fPIC", "-std=c++20"]
        subprocess.run([*command, str(source), "-o", str(aside), *include, *link], check=True)
        aside.replace(library)
    ctypes.CDLL(str(torch / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
