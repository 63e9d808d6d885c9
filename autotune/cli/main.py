"""Entry point: splits the arguments, runs the command, and maps every error to an exit status and a message."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.cli.process_start import begin, silence
from autotune.errors import AutotuneError, BadInput, Interrupted
from autotune.plain_text import escaped, plain

SPLIT = "--"
TAKE_COMMAND = ("run", "explain", "apply", "verify", "inspect", "doctor", "record")  # take a program's command after `--`
NO_TEMPORARY = "No usable temporary directory found in"  # beginning of Python's message
LONG_WORD = re.compile(r"(\S{80})\S{920,}")  # words of 1000 or more characters are cut to 80; ordinary paths are shorter


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
        argv: arguments without the program's name; None for `sys.argv`.
    """
    begin(is_process=argv is None)
    _print_anything()
    arguments, command = split(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        code = _run([a for a in arguments if a != "--debug"], command)
        if sys.stdout:
            sys.stdout.flush()  # here, because errors of a flush at exit cannot be handled
        return code
    except BadInput as error:
        _say(error.problems, escaped)
        return error.exit_code
    except AutotuneError as error:
        _say([str(error)])
        return error.exit_code
    except KeyboardInterrupt:
        _say(["interrupted"])
        return Interrupted.exit_code
    except (BrokenPipeError, SystemExit) as end:  # `autotune show | head`: not an error
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise  # typer and rich turn a closed pipe into SystemExit
        silence(sys.stdout)
        return 0
    except Exception as error:
        from autotune.run_dir import FULL

        if isinstance(error, OSError) and error.errno in FULL:
            silence(sys.stdout)
            _say([f"output: cannot be written, the disk is full ({error.strerror}). Free some space and try again."])
            return AutotuneError.exit_code
        if unwritten := _write_error_text(error):
            _say([unwritten])
            return AutotuneError.exit_code
        _say([_masked_traceback(error) if debug else _fault(error)])
        return AutotuneError.exit_code


def _print_anything() -> None:
    """Makes standard output print escapes for characters that it cannot encode, such as those of a file name not in UTF-8."""
    if getattr(sys.stdout, "errors", "") in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def split(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Returns autotune's own arguments and the program's command: the words before and after the first `--`.

    The options after `--` belong to the program, so the CLI library never sees them. The command is None if there is no `--`.
    """
    if SPLIT not in argv:
        return list(argv), None
    at = list(argv).index(SPLIT)
    return list(argv[:at]), list(argv[at + 1 :])


def _run(arguments: list[str], command: list[str] | None) -> int:
    from autotune.cli import app, usage

    try:
        os.getcwd()
    except FileNotFoundError:
        raise BadInput("cwd: the folder you are in was deleted. Change to a folder that exists: cd DIR.") from None
    taken = next((word for word in arguments if not word.startswith("-")), "")
    said = " ".join((command or [])[:1]) or "nothing"
    if command is not None and not arguments:
        raise BadInput(f"COMMAND: missing before the --, got -- {said} ... To tune a program: autotune run -- python train.py.")
    cli = app.build()
    if command is not None and taken in getattr(cli, "commands", ()) and taken not in TAKE_COMMAND:
        raise BadInput(f"--: {taken} takes no command of a program, got -- {said} ... Leave out the --.")
    try:
        code = cli(args=arguments or ["--help"], prog_name="autotune", standalone_mode=False, obj=command)
    except Exception as error:
        if not usage.is_usage_error(error):
            raise
        raise BadInput(usage.usage_problem(error, arguments)) from error
    if code == Interrupted.exit_code:  # the CLI library has turned a KeyboardInterrupt into this status
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _say(problems: Sequence[str], written: Callable[[str], str] = plain) -> None:
    from autotune.masking import Secrets

    secrets = Secrets.known(words=sys.argv[1:])  # messages quote the faulty words, which may contain secrets
    try:
        for problem in problems:
            text = LONG_WORD.sub(r"\1...", secrets.message(problem))
            print(f"autotune: {written(text)}", file=sys.stderr, flush=True)
    except OSError:  # for example, standard error goes to a file and the disk is full
        silence(sys.stderr)


def _write_error_text(error: Exception) -> str:
    """Returns the message if the disk is read-only or no temporary folder can be written; "" for any other error."""
    if not isinstance(error, OSError):
        return ""
    if error.errno == errno.EROFS:
        got = f"got {str(error.filename)!r}" if error.filename else "the disk is read-only"  # write errors name no file
        return f"output: cannot be written, {got} ({error.strerror}). Make it writable and try again."
    if str(error.strerror).startswith(NO_TEMPORARY):
        got = str(error.strerror).removeprefix(NO_TEMPORARY)
        return f"TMPDIR: no folder for temporary files can be written, got{got}. Free some space, or set TMPDIR=DIR."
    return ""


def _masked_traceback(error: Exception) -> str:
    from autotune.masking import Secrets

    return Secrets.known(words=sys.argv[1:]).text("".join(traceback.format_exception(error)))


def _fault(error: Exception) -> str:
    try:
        descriptor, name = tempfile.mkstemp(prefix="autotune-fault-", suffix=".log")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(_masked_traceback(error))
        where = f"The traceback is in {Path(name)}; --debug prints it."
    except OSError as full:
        where = f"--debug prints the traceback, which could not be written to a file ({full.strerror})."
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"internal error: {type(error).__name__}: {first}. {where}"
