"""KvikIO or torch.cuda.gds, measured when told to: `peers.py NAME BYTES DIR`, then a line for each measurement.

Prints the rates in GB/s of writing BYTES of GPU memory to a file and reading them back. Where a write leaves the file in the
page cache, getting it from there to the drive (fdatasync) is part of it. Reads start with none of the file in the cache.
"""

import ctypes
import mmap
import os
import sys
import time

name, total, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
path = os.path.join(folder, f"peer-{name}-{os.getpid()}")


def cached_share():
    """The share of the file's pages that the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    file = os.open(path, os.O_RDONLY)
    start = libc.mmap(None, total, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    pages = (ctypes.c_ubyte * (total // mmap.PAGESIZE))()
    libc.mincore(start, total, pages)
    libc.munmap(start, total)
    os.close(file)
    return sum(page & 1 for page in pages) / len(pages)


def flush():
    file = os.open(path, os.O_RDWR)
    os.fdatasync(file)
    os.close(file)


def cold():
    file = os.open(path, os.O_RDONLY)
    os.fdatasync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def kvikio_peer():
    import cupy
    import kvikio
    import kvikio.defaults

    settings = {"num_threads": 16, "task_size": 4 << 20, "auto_direct_io_read": True, "auto_direct_io_write": True}
    for key, value in list(settings.items()):
        try:
            kvikio.defaults.set({key: value})
        except Exception:  # noqa: BLE001
            del settings[key]
    data = cupy.random.randint(0, 255, total, dtype=cupy.uint8)

    def write():
        with kvikio.CuFile(path, "w") as file:
            file.pwrite(data).get()

    def read():
        with kvikio.CuFile(path, "r") as file:
            file.pread(data).get()

    mode = kvikio.defaults.get("compat_mode") if hasattr(kvikio.defaults, "get") else "?"
    return f"KvikIO {kvikio.__version__} ({mode}, {settings})", write, read


def torch_peer():
    import torch

    data = torch.randint(0, 255, (total,), dtype=torch.uint8, device="cuda")
    torch.cuda.gds.gds_register_buffer(data.untyped_storage())

    def write():
        file = torch.cuda.gds.GdsFile(path, os.O_CREAT | os.O_RDWR)
        file.save_storage(data.untyped_storage(), 0)

    def read():
        file = torch.cuda.gds.GdsFile(path, os.O_RDONLY)
        file.load_storage(data.untyped_storage(), 0)
        torch.cuda.synchronize()

    return f"torch.cuda.gds {torch.__version__}", write, read


def measure():
    start = time.perf_counter()
    write()
    written = time.perf_counter() - start
    if cached_share() > 0.01:
        start = time.perf_counter()
        flush()
        written += time.perf_counter() - start
    cold()
    start = time.perf_counter()
    read()
    done = time.perf_counter() - start
    return total / written / 1e9, total / done / 1e9


try:
    label, write, read = (kvikio_peer if name == "kvikio" else torch_peer)()
    # The file's blocks are allocated before anything is timed, as the store's are.
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    os.posix_fallocate(file, 0, total)
    os.close(file)
    measure()
except Exception as error:  # noqa: BLE001
    print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
    sys.exit(1)
print(f"ready {label}", flush=True)
try:
    for _ in sys.stdin:
        print(*measure(), flush=True)
finally:
    os.unlink(path)
