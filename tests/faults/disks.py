"""Disks that tests can fill and break: file systems in memory or in a file, which only root may mount, and a faulty libc."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

# Replaces the functions that write files. While the file FAULT_SWITCH exists, they fail below the folder FAULT_FOLDER, with the
# errno in that file. This needs neither root nor a kernel that supports quotas.
FAULTY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int fails(const char *path) {
    const char *folder = getenv("FAULT_FOLDER"), *name = getenv("FAULT_SWITCH");
    char whole[2 * PATH_MAX + 2] = "";
    if (!folder || !name || !path) return 0;
    if (path[0] != '/' && getcwd(whole, PATH_MAX)) strcat(whole, "/");
    strncat(whole, path, PATH_MAX);
    if (strncmp(whole, folder, strlen(folder))) return 0;
    FILE *file = fopen(name, "r");
    int number = 0;
    if (!file) return 0;
    if (fscanf(file, "%d", &number) != 1) number = 0;
    fclose(file);
    errno = number;
    return number;
}

static int fails_at(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = 0;
    return fails(path);
}

#define REAL(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))
ssize_t write(int fd, const void *data, size_t size) { return fails_at(fd) ? -1 : REAL(write)(fd, data, size); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    return fails_at(fd) ? -1 : REAL(pwrite64)(fd, data, size, at);
}
int mkdir(const char *path, mode_t mode) { return fails(path) ? -1 : REAL(mkdir)(path, mode); }
int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    return flags & O_CREAT && fails(path) ? -1 : REAL(open64)(path, flags, mode);
}
"""


def mount(path: Path, *words: str) -> None:
    """Mounts a file system; skips the test if this is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system; broken disks are not tested")
    done = subprocess.run(["mount", *words, path], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here ({done.stderr.strip()}); broken disks are not tested")


def unmount(path: Path) -> None:
    """Detaches a file system at once, even if it is in use."""
    subprocess.run(["umount", "--lazy", path], check=True)


@contextlib.contextmanager
def in_memory(path: Path, options: str) -> Iterator[Path]:
    """Mounts a file system in memory, because permission bits cannot make a folder unwritable for root.

    Args:
        path: the mount point, which is created.
        options: options of the mount, such as "size=2m,nr_inodes=20".
    """
    path.mkdir()
    mount(path, "-t", "tmpfs", "-o", options, "autotune-test")
    try:
        yield path
    finally:
        unmount(path)


def remount(path: Path, options: str) -> None:
    """Changes the options of a mounted file system."""
    subprocess.run(["mount", "-o", f"remount,{options}", path], check=True)


class DiskInAFile:
    """An ext4 file system in a file.

    Attributes:
        path: the mount point.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._image = path, path.with_name(f"{path.name}.img")
        path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(32 << 20)
        if not shutil.which("mkfs.ext4"):
            pytest.skip("mkfs.ext4 is not installed; failing disks are not tested")
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", self._image], check=True)
        self._mount()

    def fail(self) -> None:
        """Triggers an error in the kernel, which then refuses every write, even to open files."""
        remount(self.path, "abort")

    def unplug(self) -> None:
        """Takes the disk away, even from processes that use it."""
        unmount(self.path)

    def mend(self) -> None:
        """Brings the disk back with the data that it contained."""
        self.close()
        subprocess.run(["e2fsck", "-fp", self._image], stdout=subprocess.DEVNULL)
        self._mount()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Blocks every write until the context is left."""
        subprocess.run(["fsfreeze", "--freeze", self.path], check=True)
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", self.path], check=True)

    def close(self) -> None:
        """Unmounts the disk."""
        if os.path.ismount(self.path):
            unmount(self.path)

    def _mount(self) -> None:
        mount(self.path, "-o", "loop", str(self._image))


class FaultyWrites:
    """Lets writes below a folder fail, in processes that have the variables `environment`; see FAULTY.

    Args:
        place: a folder for the compiled library.
        folder: the folder whose writes fail.
    """

    def __init__(self, place: Path, folder: Path) -> None:
        if not shutil.which("cc"):
            pytest.skip("no C compiler; disk quotas are not tested")
        source, library = place / "faulty.c", place / "faulty.so"
        source.write_text(FAULTY, encoding="utf-8")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self._switch = place / "fault"
        self.environment = {"LD_PRELOAD": str(library), "FAULT_FOLDER": str(folder), "FAULT_SWITCH": str(self._switch)}

    def begin(self, number: int) -> None:
        """Lets writes fail with this errno."""
        self._switch.write_text(str(number), encoding="ascii")

    def end(self) -> None:
        """Lets writes succeed again."""
        self._switch.unlink()


def fill(path: Path) -> None:
    """Writes the file `ballast`, which fills the file system."""
    with (path / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def ended(tuner: subprocess.Popen[str], *, within_s: float = 90) -> str:
    """Waits for a tuner that has to give up; returns its error message. There must be exactly one."""
    _, err = tuner.communicate(timeout=within_s)
    assert tuner.returncode == 2, err
    assert "Traceback" not in err
    assert "internal error" not in err
    said = [line for line in err.splitlines() if line.startswith("autotune: ")]
    assert len(said) == 1, err
    return said[0]
