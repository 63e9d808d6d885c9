"""Takes a picture of the top of a report with an installed browser, for a README or a message."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image, PngImagePlugin

from autotune.errors import BadInput

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH_PX, HEIGHT_PX = 1440, 900
SPARE_PX = 200  # height that Chromium keeps for itself in a window, and leaves empty in a picture
NUM_COLOURS = 64  # a page has few colours, and with a palette the file is a third as large
TIMEOUT_S = 60.0


def take(page: str, file: Path, *, width_px: int = WIDTH_PX) -> bytes:
    """Returns a PNG of the first screen of a page.

    Args:
        page: the page, as HTML.
        file: where the picture will be written.
        width_px: its width; the height is fixed.

    Raises:
        BadInput: the file's name does not end in .png, no browser is installed, or the browser fails.
    """
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    problems = [] if file.suffix.lower() == ".png" else [f"--picture: not a PNG, got {str(file)!r}. Give FILE.png."]
    if browser is None:
        problems.append(
            f"--picture: no browser was found. Looked for: {', '.join(BROWSERS)}. Install one: apt-get install chromium."
        )
    if problems or browser is None:
        raise BadInput(problems)
    temporary = tempfile.gettempdir()  # raises an error with a message of its own if no folder is usable
    try:
        with tempfile.TemporaryDirectory(prefix="autotune-picture-", ignore_cleanup_errors=True) as folder:
            return _taken(page, file, Path(folder), browser, width_px)
    except OSError as error:
        got = str(error.filename or temporary)
        raise BadInput(
            f"--picture: no temporary file can be written, got {got!r} ({error.strerror}). Free some space, or set TMPDIR=DIR."
        ) from error


def _taken(page: str, file: Path, folder: Path, browser: str, width_px: int) -> bytes:
    """Returns the picture that a browser takes, made in a folder for temporary files."""
    source, made = folder / "report.html", folder / "report.png"
    source.write_text(page, encoding="utf-8", errors="backslashreplace")
    arguments = [
        browser, "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/profile",
        f"--window-size={width_px},{HEIGHT_PX + SPARE_PX}", f"--screenshot={made}", source.as_uri(),
        *(["--no-sandbox"] if os.geteuid() == 0 else []),  # as root, Chromium runs only without a sandbox
    ]  # fmt: skip
    _run(arguments)
    content = io.BytesIO()
    try:
        with Image.open(made) as whole:
            taken = whole.convert("RGB").crop((0, 0, width_px, HEIGHT_PX))
        origin = PngImagePlugin.PngInfo()
        origin.add_text("Software", "autotune")  # marks a picture that autotune made and may replace later
        taken.quantize(NUM_COLOURS).save(content, format="PNG", optimize=True, pnginfo=origin)
    except (OSError, SyntaxError) as error:  # no picture, or half a picture because the disk is full
        raise BadInput(
            f"--picture: {browser} made no whole picture, got {str(file)!r}. Free some space in {folder.parent}, or try "
            "another browser."
        ) from error
    return content.getvalue()


def _run(arguments: list[str]) -> None:
    try:
        subprocess.run(arguments, capture_output=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(
            f"--picture: {arguments[0]} cannot take a picture, got {type(error).__name__}. Try another browser."
        ) from error
