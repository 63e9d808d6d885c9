import base64
import json

import pytest
import yaml
from omegaconf import OmegaConf

from autotune import masking
from autotune.config.schema import DATA, DEVICES, LAUNCHERS, OPTIMIZERS, SAMPLERS, SOURCES, WARM
from autotune.harness.protocol import APPLIED, NOT_APPLICABLE, OVERRIDDEN
from autotune.knobs.catalogue import CATALOGUE
from autotune.masking import Secrets, is_masked, is_secret
from autotune.records import OBJECTIVES, Kind, Outcome, Tier
from autotune.studies import create
from autotune.trials.events import Masked
from tests.support.listener import RecordingListener
from tests.support.studies import make_study


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("HF_TOKEN=abc", "HF_TOKEN=***"),
        ('{"api_key": "abc", "lr": 0.1}', '{"api_key": "***", "lr": 0.1}'),
        ('{\\"api_key\\": \\"abc\\"}', '{\\"api_key\\": \\"***\\"}'),
        ("aws_secret_access_key = AB/CD+EF", "aws_secret_access_key = ***"),
        ("clientSecret: xyz", "clientSecret: ***"),
        ("PGPASSWORD=x DB_PASS=y HFTOKEN=z", "PGPASSWORD=*** DB_PASS=*** HFTOKEN=***"),
        ("password='hunter2'", "password='***'"),
        ("--password hunter2 --epochs 3", "--password *** --epochs 3"),
        ("--api-key=hunter2", "--api-key=***"),
        ("['train.py', '--api-key', 'hunter2', '--lr', '1']", "['train.py', '--api-key', '***', '--lr', '1']"),
        ("Namespace(api_key='hunter2', lr=0.1)", "Namespace(api_key='***', lr=0.1)"),
        ("Authorization: Bearer abcdefghijklmnop", "Authorization: ***"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: ***"),
        ("https://me:pass@host/x?token=abc&n=1", "https://***@host/x?token=***&n=1"),
        ("postgresql+psycopg2://user:p%40ss@db:5432/x", "postgresql+psycopg2://***@db:5432/x"),
        ("git clone https://x:ghs_short@github.com/a/b", "git clone https://***@github.com/a/b"),
        ("using hf_abcdefghijklmnopqrst now", "using *** now"),
        ("key=abc", "key=***"),
        ("x-key: abc --data-key def", "x-key: *** --data-key ***"),
        ("embedding_api_token=abc --agent-pool-token ghi", "embedding_api_token=*** --agent-pool-token ***"),
        ("DropBoxToken=abc --password 19.840101", "DropBoxToken=*** --password ***"),
    ],
)
def test_secrets_are_masked(text, masked):
    assert Secrets().text(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'batch'",
        "Missing key: conv1.weight",
        "tokens_per_s=1234 num_tokens: 5",
        "tokenizer=bert TOKENIZERS_PARALLELISM=false",
        "forward_pass=12 backward_pass: 3",
        "PWD=/home/me OLDPWD=/tmp",
        "ValueError: expected 3 channels, got 4",
        "mail someone@example.org, see https://example.org/a",
        "monkey=1 keyboard=2",
        "--eos_token_id=2 --max-token-length 512 --placeholder_token cat --image_key jpg --text-key=text",
        "--token-budget 4096 --token_mixer=attention --token-pooling mean --token-loss-weight off",
        "--metric-key val_loss --monitor_key=loss --prng-key 42 --csv-img-key filepath --csv-caption-key title",
        "--energy_key=REF_energy --forces_key=REF_forces --dataset-key train --class-name-key label",
        "--key-frames --token",
        "HF_TOKEN: ${oc.env:HF_TOKEN} http://me:${oc.env:PASSWORD}@host",
    ],
)
def test_text_that_only_resembles_a_secret_is_unchanged(text):
    assert Secrets().text(text) == text


def test_secret_values_of_the_environment_are_masked_anywhere_in_a_text():
    secrets = Secrets.known({"WANDB_API_KEY": "0123456789", "HOME": "/root/home", "USE_TOKEN": "1", "DB_PASSWORD": "hunter2"})
    assert (
        secrets.text("x0123456789x, 1 try, hunter2 and hunter22 in /root/home")
        == "x***x, 1 try, *** and hunter22 in /root/home"
    )


def test_a_secret_is_masked_in_every_encoding():
    secret = 'pä"ss/w0rd\n+secret'
    secrets = Secrets.known({"APP_SECRET": secret})
    for written in (secret, json.dumps({"a": secret}), repr([secret]), json.dumps(secret, ensure_ascii=False)):
        assert "w0rd" not in secrets.text(written)
    assert secrets.text("x=p%C3%A4%22ss%2Fw0rd%0A%2Bsecret") == "x=***"


def test_each_line_of_a_key_is_masked_but_the_path_of_a_token_file_is_not(tmp_path):
    body = base64.b64encode(bytes(range(90))).decode()
    secrets = Secrets.known({"SSH_KEY": f"-----BEGIN KEY-----\n{body}\n-----END KEY-----", "TOKEN_FILE": str(tmp_path)})
    assert secrets.text(f"[rank0]: {body} in {tmp_path}") == f"[rank0]: *** in {tmp_path}"


def test_credentials_from_urls_in_the_environment_are_masked_anywhere():
    secrets = Secrets.known({"DATABASE_URL": "postgres://app:s3cret-pass@db/x", "PROXY": "http://ghs_tokentoken@p:1"})
    assert secrets.text("auth failed for app with s3cret-pass, ghs_tokentoken") == "auth failed for app with ***, ***"


def test_secrets_on_the_command_line_are_masked_even_if_they_are_plain_words():
    words = ["env.MY_TOKEN=abc", "--api-key", "def", "--password=with,commas;and)more", "x=https://u:ghi@h/"]
    secrets = Secrets.known({}, words)
    assert secrets.text("abc abcd def ghi with,commas;and)more") == "*** abcd *** *** ***"


def test_argument_lists_are_masked_word_by_word():
    words = ["python", "train.py", "--api-key", "abc", "--password=a b,c", "--data", "s3://k:s@b/x", "--token", "--lr", "1"]
    masked = ["python", "train.py", "--api-key", "***", "--password=***", "--data", "s3://***@b/x", "--token", "--lr", "1"]
    assert Secrets().words(words) == masked
    assert Secrets.known({}, words).words(masked) == masked
    assert Secrets().words(["bash", "-c", "cd x; TOKEN=abc python t.py"]) == ["bash", "-c", "cd x; TOKEN=*** python t.py"]


def test_secrets_of_keys_typed_with_a_plus_are_masked_whole():
    words = ["+env.DB_PASSWORD=two words", "++env.MY_TOKEN=abc"]
    assert Secrets().words(words) == ["+env.DB_PASSWORD=***", "++env.MY_TOKEN=***"]
    assert Secrets.known({}, words).text("it is two words") == "it is ***"


def test_switches_and_small_numbers_are_no_secrets_whatever_their_key():
    assert not is_secret("USE_TOKEN", "true")
    assert is_secret("USE_TOKEN", "truest")
    assert is_secret("USE_TOKEN", "123")
    secrets = Secrets.known({}, ["env.USE_TOKEN=true", "--my-key=12"])
    assert secrets.text("is it true? env.USE_TOKEN=False") == "is it true? env.USE_TOKEN=False"
    assert secrets.words(["env.USE_TOKEN=true"]) == ["env.USE_TOKEN=true"]
    assert secrets.document({"env": {"USE_TOKEN": "true", "A_KEY": "12"}}) == {"env": {"USE_TOKEN": "true", "A_KEY": "12"}}


def test_settings_without_a_value_and_fractions_are_no_secrets_whatever_their_key():
    words = ["python", "train.py", "logger.api_key=null", "--hub-token", "None", "--token-dropout", "0.0", "--token-eps=1e-05"]
    secrets = Secrets.known({"TOKEN_DROPOUT": "0.25"}, words)
    document = {"ci": None, "spared_s": 0.0, "values": [0.25, 1e-05], "why": "null, None", "token_dropout": 0.1}
    assert json.loads(secrets.stored(json.dumps(document))) == document
    assert secrets.words(words) == words
    assert secrets.document(document) == document
    assert secrets.text("loss is None at --token-dropout 0.0") == "loss is None at --token-dropout 0.0"


def test_documents_are_masked_by_key_and_keep_everything_else():
    document = {
        "env": {"HF_TOKEN": "abc", "A_TOKEN": "${oc.env:A_TOKEN}", "OMP": "1", "B_TOKEN": "***2", "C_TOKEN": ""},
        "env.D_TOKEN": ["a", 12345, None, True],
        "reports": {"env.D_TOKEN": {"status": "applied", "observed": None}},
        "uri": "http://me:pw@h",
        "outcome": Outcome.error,
        "numbers": [1, 2.5],
    }
    assert Secrets().document(document) == {
        "env": {"HF_TOKEN": "***", "A_TOKEN": "${oc.env:A_TOKEN}", "OMP": "1", "B_TOKEN": "***2", "C_TOKEN": ""},
        "env.D_TOKEN": ["***", "***", None, True],
        "reports": {"env.D_TOKEN": {"status": "applied", "observed": None}},
        "uri": "http://***@h",
        "outcome": Outcome.error,
        "numbers": [1, 2.5],
    }


def test_messages_of_autotune_mask_values_and_keep_key_names():
    secrets = Secrets.known({"HF_TOKEN": "hf_abc123def"})
    said = "env.HF_TOKEN: not usable text, got 'hf_abc123def'. Set it at https://me:pw@h."
    assert secrets.message(said) == "env.HF_TOKEN: not usable text, got '***'. Set it at https://***@h."


def test_is_masked_recognises_masked_values():
    assert is_masked({"command": ["train.py", "--api-key", "***"]})
    assert is_masked({"space": {"env.T": {"choice": ["***1"]}}})
    assert not is_masked({"env": {"T": "${oc.env:T}"}, "n": [1, None]})


def test_masking_a_long_line_does_not_take_quadratic_time():
    assert Secrets().text("a" * 200_000) == "a" * 200_000
    assert Secrets().text("a:" * 50_000).startswith("a:")


def test_function_without_credentials_masks_only_those_in_urls():
    assert masking.without_credentials("see https://me:secret@host/x, TOKEN=1") == "see https://***@host/x, TOKEN=1"


def test_notices_and_study_files_are_always_masked(tmp_path):
    secrets, told = Secrets(["hunter2hunter2"]), RecordingListener()
    Masked(told, secrets).notice("it cannot be forgotten: hunter2hunter2")
    folder = create(tmp_path, "s")
    folder.mask = secrets.stored
    folder.write_summary({"note": "hunter2hunter2"})
    folder.write_best("# hunter2hunter2\n")
    assert told.named("notice") == ["it cannot be forgotten: ***"]
    assert not [path for path in folder.path.rglob("*") if path.is_file() and "hunter2" in path.read_text()]


def test_sizes_of_files_are_kept_if_a_path_sounds_like_a_secret():
    evidence = {"files_left": {"out_token/model": 4096}, "files_unguarded": {"secret/a": "too large"}, "hub_token": "abc"}
    assert Secrets().document(evidence) == {**evidence, "hub_token": "***"}


def test_a_secret_in_the_name_of_a_file_that_is_a_key_is_masked():
    secrets = Secrets.known({"DB_PASSWORD": "correcthorse"}, [])
    stored = secrets.stored(json.dumps(secrets.document({"files_left": {"run_correcthorse.pt": 1}})))
    assert json.loads(stored) == {"files_left": {"run_***.pt": 1}}


@pytest.mark.parametrize(
    "word", ["baseline", "interrupted", "interrupt", "training", "loader", "batch", "study", "name", "model", "machine"]
)
def test_secret_that_is_a_word_of_autotune_leaves_its_records_readable(tmp_path, word):
    """A masked key or kind of trial made a record unreadable, and a masked key of YAML the whole file."""
    secrets = Secrets.known({}, ["--password", word])
    folder = make_study(tmp_path)
    wanted = folder.read_study(), folder.read_trials(), folder.read_summary()["best"]
    folder.mask = secrets.stored
    folder.write_study(wanted[0])
    for trial in wanted[1]:
        folder.write_trial(trial)
    folder.write_summary(folder.read_summary())
    kinds = [(trial.kind, trial.outcome, trial.changed) for trial in folder.read_trials()]
    assert kinds == [(trial.kind, trial.outcome, trial.changed) for trial in wanted[1]]
    assert folder.read_summary()["best"]["overrides"] == wanted[2]["overrides"]
    document = {
        "study": {"name": "mine", "interrupt_after": 3}, "tiers": "training", "pinned": ["loader.batch_size"],
        "machine.cores": 2, "model": [{"name": "m"}],
    }  # fmt: skip
    assert json.loads(secrets.stored(json.dumps(document, indent=1))) == document
    del document["pinned"]  # YAML has such a list only in quotes
    assert yaml.safe_load(secrets.stored(OmegaConf.to_yaml(document))) == document
    assert secrets.document(document) == document
    assert secrets.stored(json.dumps({"why": f"login as {word} failed"})) == '{"why": "login as *** failed"}'


def test_words_with_a_meaning_in_records_are_known_to_the_masking():
    choices = {*SAMPLERS, *LAUNCHERS, *DEVICES, *WARM, *SOURCES, *DATA, *OPTIMIZERS}
    states = {"running", "complete", "interrupted", "failed", "faster", "same", "ambiguous", "holds", "no longer holds"}
    assert {*Outcome, *Kind, *Tier, *OBJECTIVES, APPLIED, NOT_APPLICABLE, OVERRIDDEN} | choices | states <= masking.OWN_VALUES
    assert {key.partition(".")[0] for key in CATALOGUE} == masking.OWN_GROUPS


def test_masked_document_can_still_be_read():
    typed = ["--password", "123", "--login-token", "seconds", "--api-key", "hunter2x", "--pin-token", "123.4", "x://null@host"]
    secrets = Secrets.known({"A_TOKEN": "12345678"}, typed)
    document = {"seconds": 123.4, "n": [123, 0.12345678], "why": 'as "seconds": hunter2x, 12345678', "hunter2x: yes": "seconds"}
    masked = {"seconds": 123.4, "n": [123, 0.12345678], "why": 'as "***": ***, ***', "***: yes": "***"}
    more = {"ci": None, "is_recipe": True}
    assert json.loads(secrets.stored(json.dumps({**document, **more, "null": "null"}))) == {**masked, **more, "null": "***"}
