from tests.benchmarks import advisories

VULN = {"name": "pyyaml", "version": "5.3", "vulns": [{"id": "PYSEC-2021-142", "fix_versions": ["5.4"]}]}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.14.1)"}
FINE = {"name": "optuna", "version": "5.0.0", "vulns": []}


def test_pins_returns_all_pinned_packages_or_those_named():
    text = advisories.CONSTRAINTS.read_text()
    assert len(advisories.pins(text)) == len([line for line in text.splitlines() if line and line[0] != "#"]) > 100
    assert [pin.partition("==")[0] for pin in advisories.pins(text, ["pyyaml", "mlflow"])] == ["mlflow", "pyyaml"]


def test_summary_is_fine_only_if_all_were_looked_up_and_have_no_advisory():
    assert advisories.summary([FINE]) == (["1 packages, 1 looked up, 0 advisories"], True)
    assert advisories.summary([FINE, SKIPPED])[1] is advisories.summary([VULN])[1] is advisories.summary([])[1] is False
    assert advisories.summary([VULN])[0][0] == "advisory  pyyaml 5.3: PYSEC-2021-142, fixed in 5.4"
