"""Finds every place in autotune that writes a file. SITES must say for each of them what happens if the write fails.

If you add a write, this test fails until SITES contains it. `test_disks.py` and `test_folder.py` run studies on disks that are
full or fail.
"""

import ast
import re
from pathlib import Path

import autotune

ROOT = Path(autotune.__file__).parent
WRITING = {
    "write_text", "write_bytes", "write_json", "touch", "mkdir", "makedirs", "rename", "renames", "symlink", "symlink_to",
    "hardlink_to", "truncate", "ftruncate", "posix_fallocate", "pwrite", "mkstemp", "mkdtemp", "TemporaryFile",
    "NamedTemporaryFile", "TemporaryDirectory", "copyfile", "copyfileobj", "copy2", "copytree", "save", "savez",
    "export_chrome_trace", "JournalFileBackend", "MlflowClient", "exchange",
}  # fmt: skip
QUALIFIED = {"os.replace", "os.link", "shutil.copy", "shutil.move", "sqlite3.connect"}
NAMES = WRITING | {"open", "fdopen", "replace"} | {name.rpartition(".")[2] for name in QUALIFIED}
FLAGS = re.compile(r"O_(WRONLY|RDWR|CREAT|APPEND|TRUNC)")
MODE = re.compile(r"(?=.*[wax+])[rwaxbt+]{1,3}")
NO_FILE = re.compile(r"devnull|/proc/")

# What happens if a write fails -> functions with such writes.
SITES = {
    "the study ends with FolderLost": """
        documents.make_folder documents.write_bytes documents.write_json documents.write_text owner.Claim.__enter__
        replay.table.write run_dir.StudyFolder._write run_dir.StudyFolder.check search.study._Journal._append
        search.study.begin_study
    """,
    "the trial fails; then the disk is checked, and the study ends with FolderLost": """
        harness.last_step.Announcement.tell harness.ending.Ending._tell_error harness.ending.Ending._write_result
        harness.ending.Ending.broke harness.ending.Ending.give_up harness.explain.passes.Explained.finish
        harness.peers.Peers.claim harness.peers.Peers.is_over harness.peers.Peers.lead harness.protocol.write_json
        harness.protocol.write_text launchers.local._prepare launchers.supervisor.Supervisor._start
    """,
    "the study or the program goes on without it": """
        cli.main._fault harness.stack_requests._answer harness.stack_requests.answer_by_file harness.boot.sign_in
        harness.explain.kept_results.leave harness.explain.skipping.for_workers harness.explain.trace.TracePass._exported
        harness.explain.workers.ObservedWorker._write harness.explain.workers.prefix harness.explain.workers.remove
        harness.guarded_files._append harness.peers.Peers._renew
        harness.phases.Phases.beat launchers.guarded.Guarded.copy_aside launchers.hangs.look launchers.keeper.Trial._list
        launchers.rank_results.RankResults.refresh launchers.shared_memory.forget
        launchers.shared_memory.note launchers.slots.SlotsLauncher.sweep launchers.slurm.Srun.__init__
        launchers.slurm_cancel.mark launchers.tuner_files.is_free monitors.sealing._rewrite owner.Claim.__exit__ owner.held
        monitors.sealing.seal_trace trackers.store.only_writer trackers.sync.note trials.runner.TrialRunner.keep_logs
    """,
    "the study or the program goes on without it; the callers handle the error": """
        cli.sync.TrackingProcess._start harness.explain.kineto.quiet harness.worker._map harness.worker.create
        launchers.guarded.Guarded._put_copy_in_place launchers.guarded._new_file launchers.guarded.copy
        monitors.logs._copy_end monitors.logs._take_out_middle monitors.sealing._overwrite
        report.writing.write_report trackers.mlflow.MlflowTracker._connect trackers.probe._file_problem trackers.store._lock
        trackers.store.ensure_store
    """,
    "the command says so, since the user named the file or the folder": """
        cli.output.write cli.output.write_bytes cli.prune._remove_one cli.report.report
        explain.tables.write_tables launchers.remote._token studies.create
    """,
    "the command says so: a file for temporary use, in TMPDIR": """
        cli.inspect._save cli.inspect.inspect cli.ui._serve launchers.child.ChildTransport.__init__
        launchers.ray.broker.Relay.start launchers.slots.SlotsLauncher.__init__ launchers.slots.SlotsLauncher._folder
        launchers.supervision.SupervisorProcess.__init__ launchers.user_files.KeeperProcess.__init__
        machine.probes.__init__.Probe.__init__ report.picture._taken report.picture.take
    """,
    "the program's own writes and data, which autotune only passes on": """
        harness.guarded_files.Kept._clone harness.guarded_files.Kept._place_for harness.guarded_files.Kept.renaming.renamed
        harness.guarded_files.Kept.saving.saved
        machine.probes.data._own_file programs.vision.ensure_photos programs.vision.write_photos
    """,
}
GUARDED = "the study or the program goes on without it"


def writes(node):
    """Returns whether a call may write a file."""
    last = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if last not in NAMES:
        return False
    name, text = ast.unparse(node.func), ast.unparse(node)
    if NO_FILE.search(text.partition("\n")[0]):
        return False
    if name == "os.open":
        return bool(FLAGS.search(text))
    if last in ("open", "fdopen"):
        modes = [*node.args, *(word.value for word in node.keywords if word.arg == "mode")]
        return any(isinstance(mode, ast.Constant) and MODE.fullmatch(str(mode.value)) for mode in modes)
    if last == "replace":  # Path.replace(target), not str.replace(old, new) or dataclasses.replace(it, name=value)
        return name == "os.replace" or ("." in name and len(node.args) == 1 and not node.keywords)
    return last in WRITING or name in QUALIFIED


class Finder(ast.NodeVisitor):
    """Collects {function: whether an OSError is handled for each of its writes} for a module."""

    def __init__(self, module):
        self.found, self._scope, self._depth = {}, [module], 0

    def _named(self, node):
        depth, self._depth = self._depth, 0
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()
        self._depth = depth

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _named

    def visit_Try(self, node):
        caught = " ".join(ast.unparse(handler.type) for handler in node.handlers if handler.type)
        self._within(bool(re.search(r"\b(OSError|Exception)\b", caught)), node.body)
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)

    def visit_With(self, node):
        is_suppressed = any("suppress(OSError" in ast.unparse(item) for item in node.items)
        self._within(is_suppressed, [*node.items, *node.body])

    def _within(self, is_handled, parts):
        self._depth += is_handled
        for part in parts:
            self.visit(part)
        self._depth -= is_handled

    def visit_Call(self, node):
        if writes(node):
            place = ".".join(self._scope)
            self.found[place] = self.found.get(place, True) and self._depth > 0
        self.generic_visit(node)


def sites():
    """Returns {function: whether an OSError of its writes is handled there}, for all of autotune but its test helpers."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not module.startswith("testing."):
            finder = Finder(module)
            finder.visit(ast.parse(path.read_text()))
            found |= finder.found
    return found


def test_all_writes_are_listed_and_errors_of_optional_writes_are_handled():
    found, listed = sites(), [name for names in SITES.values() for name in names.split()]
    assert len(listed) == len(set(listed)), "listed twice"
    assert sorted(set(found) - set(listed)) == [], "new: list it above, with what happens if the disk is full"
    assert sorted(set(listed) - set(found)) == [], "gone: remove it above"
    assert [name for name in SITES[GUARDED].split() if not found[name]] == [], "listed as handled, but an OSError is not caught"


def test_writes_are_distinguished_from_reads():
    wrote = "open(a, 'w')|a.open('ab')|os.open(a, os.O_CREAT)|a.replace(b)|os.replace(a, b)|a.mkdir()|open(b, mode='r+b')"
    read = "open(a)|a.open('rb')|os.open(a, os.O_RDONLY)|a.replace('b', 'c')|dataclasses.replace(a, b=1)|open(os.devnull, 'w')"
    assert all(writes(ast.parse(code).body[0].value) for code in wrote.split("|"))
    assert not any(writes(ast.parse(code).body[0].value) for code in read.split("|"))
