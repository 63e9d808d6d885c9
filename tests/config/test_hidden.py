"""Secret knob values: a composed study holds only stand-ins, and a trial's process gets the values."""

import hashlib
import json
import sys

import pytest
import yaml
from omegaconf import OmegaConf

from autotune.config.command import CommandTemplate
from autotune.config.hidden import recovered
from autotune.config.schema import StudyConfig
from autotune.errors import BadInput
from autotune.harness.protocol import HIDDEN_VARIABLE, STAND_IN
from autotune.masking import MASK
from autotune.space import Choice


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("OWN_TOKEN", "first-of-all")
    monkeypatch.delenv("MY_TOKEN", raising=False)


def everything(composed) -> str:
    space = {key: domain.as_json() if domain else None for key, domain in composed.space.domains.items()}
    return repr(
        [composed.yaml, composed.title, space, composed.space.pinned, composed.command.placeholders, composed.config.env]
    )


def test_pinned_secret_is_readable_only_in_the_environment_of_a_trial(make):
    composed = make("env.MY_TOKEN=abc", "env.PLAIN=1")
    assert composed.space.pinned == {"env.MY_TOKEN": "***", "env.PLAIN": "1"}
    assert yaml.safe_load(composed.yaml)["env"] == {"MY_TOKEN": "***", "PLAIN": "1"}
    assert "abc" not in everything(composed)
    got = composed.hidden.environment({"MY_TOKEN": "***", "PLAIN": "1"})
    digests = got.pop(HIDDEN_VARIABLE)
    assert got == {"MY_TOKEN": "abc", "PLAIN": "1"}
    assert json.loads(digests) == {"MY_TOKEN": hashlib.sha256(b"abc").hexdigest()}


def test_a_domain_of_secrets_is_searched_as_numbered_stand_ins(make):
    composed = make("env.MY_TOKEN=choice(alpha,beta)")
    assert composed.space.domains["env.MY_TOKEN"] == Choice(("***1", "***2"))
    assert "alpha" not in everything(composed)
    assert composed.hidden.environment({"MY_TOKEN": "***2"})["MY_TOKEN"] == "beta"
    assert composed.secrets.text("login with beta") == "login with ***"


def test_secret_already_in_the_environment_gets_the_stand_in_of_the_baseline(make):
    composed = make("env.OWN_TOKEN=choice(first-of-all,second)")
    assert composed.space.domains["env.OWN_TOKEN"] == Choice(("***", "***1"))
    assert composed.hidden.environment({"OWN_TOKEN": "***"})["OWN_TOKEN"] == "first-of-all"


def test_credentials_in_an_address_are_hidden_under_any_variable_name(make):
    composed = make("env.PROXY=http://me:pw@host", "tracker.uri=https://me:pw@host")
    assert composed.space.pinned["env.PROXY"] == "***"
    assert composed.config.tracker.uri == "https://me:pw@host"
    assert yaml.safe_load(composed.yaml)["tracker"]["uri"] == "https://***@host"
    assert "me:pw" not in everything(composed)


def test_plain_values_have_no_stand_in(make):
    composed = make("env.OMP_PROC_BIND=choice(true,false)", "env.TOKENIZERS_PARALLELISM=false")
    assert composed.space.domains["env.OMP_PROC_BIND"] == Choice(("true", "false"))
    assert composed.space.pinned == {"env.TOKENIZERS_PARALLELISM": "false"}
    assert composed.hidden.environment({"A": "b"}) == {"A": "b"}


def test_a_secret_in_the_command_reaches_the_program_and_no_title(make):
    command = [sys.executable, "-c", "pass", "--api-key", "abc", "--token={env.MY_TOKEN=xyz}"]
    composed = make("env.HF_TOKEN=q", command=command)
    argv = composed.command.argv(composed.hidden.reveal({**composed.command.placeholders, **composed.space.pinned}))
    assert argv[3:] == ["--api-key", "abc", "--token=xyz"]
    assert composed.title.endswith("-c pass --api-key '***' '--token=***'")
    assert composed.command.placeholders == {"env.MY_TOKEN": "***1"}


def written_down(composed):
    """Returns what a resumed study reads from its folder: everything except the values behind the stand-ins."""
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(StudyConfig), yaml.safe_load(composed.yaml)))
    parts = composed.secrets.words(composed.command.parts)
    return config, composed.space, CommandTemplate(parts=parts, placeholders=composed.command.placeholders)


def test_secret_given_as_a_reference_is_recovered(make):
    composed = make("env.MY_TOKEN=${oc.env:OWN_TOKEN}", "env.OWN_TOKEN=choice(first-of-all)")
    config, space, command = written_down(composed)
    hidden = recovered(config, space, command)
    assert hidden.environment(config.env)["MY_TOKEN"] == "first-of-all"
    assert hidden.environment({"OWN_TOKEN": "***"})["OWN_TOKEN"] == "first-of-all"


def test_typed_secret_is_recovered_from_the_environment_or_asked_for(make, monkeypatch):
    parts = written_down(make("env.MY_TOKEN=abc"))
    with pytest.raises(BadInput, match=r"env\.MY_TOKEN: a secret, whose value was not recorded\. Set the variable MY_TOKEN"):
        recovered(*parts)
    monkeypatch.setenv("MY_TOKEN", "abc")
    assert recovered(*parts).environment({"MY_TOKEN": "***"})["MY_TOKEN"] == "abc"


def test_secrets_in_domains_and_arguments_cannot_be_recovered(make):
    command = [sys.executable, "-c", "pass", "--api-key", "abc"]
    with pytest.raises(BadInput) as caught:
        recovered(*written_down(make("env.MY_TOKEN=choice(alpha,beta)", command=command)))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["COMMAND", "env.MY_TOKEN", "env.MY_TOKEN"]
    assert "abc" not in str(caught.value)


def test_tuner_and_harness_use_the_same_prefix_of_stand_ins():
    assert STAND_IN == MASK
