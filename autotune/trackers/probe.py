"""Checks cheaply whether a tracking store answers: without MLflow, without retries, with a short timeout.

By default, MLflow waits 247 s for a server that refuses connections and 101 s for a SQLite file that it cannot open. Importing
MLflow takes two seconds on one core. This check avoids these waits if a store is down.
"""

from __future__ import annotations

import http.client
import sqlite3
import ssl
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path


def problem_of(uri: str, timeout_s: float) -> str:
    """Returns why a store cannot be written to, in one line; "" if it answers, or if its kind is not checked here."""
    if uri.startswith(("http://", "https://")):
        return _server_problem(uri, timeout_s)
    if uri.startswith("sqlite:///"):
        return _file_problem(Path(uri.removeprefix("sqlite:///").partition("?")[0]), timeout_s)
    return ""


def _server_problem(uri: str, timeout_s: float) -> str:
    """Returns why a server does not answer; "" if it does.

    Any HTTP response counts as an answer, even an error: a proxy may want a password, which only MLflow sends.
    """
    parts = urllib.parse.urlsplit(uri)
    address = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], path=f"{parts.path}/health"))
    try:
        with urllib.request.urlopen(address, timeout=timeout_s, context=ssl._create_unverified_context()):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        return ""
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except urllib.error.URLError as error:
        late = isinstance(error.reason, TimeoutError)
        return f"no answer within {timeout_s:g} s" if late else f"no answer ({_why(error.reason)})"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"no answer ({_why(error)})"


def _file_problem(path: Path, timeout_s: float) -> str:
    if not path.exists():
        return ""  # the first writer creates it
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=timeout_s, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            connection.execute(f"PRAGMA user_version = {int(version)}")  # a write, which fails in a read-only folder
            connection.execute("ROLLBACK")
        finally:
            connection.close()
    except sqlite3.Error as error:
        return f"{path} cannot be written ({error})"
    return ""


def _why(error: object) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__).lower()
