"""The comparison of traces with HTA: what it prints with HTA, without HTA, and without traces."""

from pathlib import Path

from tests.benchmarks import trace_oracle

TRACES = Path(__file__).parents[1] / "data" / "traces"


def test_figures_of_a_real_trace_are_compared_with_those_of_hta(monkeypatch, capsys):
    [path] = map(str, TRACES.iterdir())
    theirs = {**trace_oracle.figures(Path(path)), "idle": None}
    theirs["compute"] *= 1.25
    monkeypatch.setattr(trace_oracle, "of_hta", lambda paths, interpreter: {path: theirs} if interpreter else {})
    trace_oracle.compare(TRACES, "python of the other program")
    assert f"largest difference of 1 traces: 20.00% (compute, {path})" in capsys.readouterr().out
    trace_oracle.compare(TRACES, None)
    assert "nothing was compared: HTA is needed" in capsys.readouterr().out


def test_a_folder_without_traces_is_named(tmp_path, capsys):
    (tmp_path / "other.json").write_text("{}")
    trace_oracle.compare(tmp_path, None)
    assert capsys.readouterr().out == f"no GPU trace in {tmp_path}\n"
