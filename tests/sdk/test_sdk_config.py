"""Settings fail at the door or never."""

from __future__ import annotations

import traceback

import pytest
import sojourn
from sojourn.config import Config, Environment

EMPTY = Environment()


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://gw.example/llm/v1", "https://gw.example/llm"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("localhost:8000", "http://localhost:8000"),
        ("[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_a_pasted_base_url_is_understood(url, root):
    assert Config.resolve(url, environment=EMPTY).url == root


@pytest.mark.parametrize(
    "url",
    ["localhost", "x:99999", "ftp://x", "http://", "http://x:port", "http://x:99999", "/v1", "http://[::1"],
)
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(sojourn.ConfigError):
        sojourn.init(url)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://bob:s3cret@gw:8000",
        "http://bob:s3cret/s3cret@gw:8000",
        "http://bob:s3cret@s3cret@gw:port",
        "http://[bob:s3cret@gw:8000",
        "bob:s3cret://s3cret@gw:8000",
    ],
)
def test_an_error_names_the_server_and_not_the_password(url):
    entry = url + "0000" if url.startswith("ftp") else url  # the scheme of an entry of hosts may be any
    for arguments in ({"url": url}, {"url": "http://x", "hosts": [entry]}, {"url": "http://x", "hosts": url}):
        with pytest.raises(sojourn.ConfigError, match="gw:") as caught:
            sojourn.init(**arguments)
        assert "s3cret" not in "".join(traceback.format_exception(caught.value))


def test_a_password_in_the_environment_is_not_logged(python):
    code = "import sojourn; sojourn.current_program(); sojourn.flush()"
    said = python(code, env={"SOJOURN_URL": "http://bob:s3/cret@gw:8000"}).stderr
    assert "sojourn stays off: 'http://gw:8000' (user name and password left out)" in said
    assert "s3" not in said


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://bob:s3cret@127.0.0.1:1", "http://127.0.0.1:1"),
        ("http://bob:s3cret@127.0.0.1:1/llm/v1", "http://127.0.0.1:1/llm"),
        ("http://127.0.0.1:1/team@s3cret", "http://127.0.0.1:1/..."),
        ("http://127.0.0.1:12/s3cret@gw:8000", "http://127.0.0.1:12/..."),  # "12/s3cret" may be a password
    ],
)
def test_stats_name_the_server_and_not_the_password(url, shown):
    sojourn.init(url, probe_timeout_s=0.0)
    assert sojourn.stats().url == shown
    assert "s3cret" not in repr(sojourn.stats())


def test_no_url_at_all_names_both_ways():
    with pytest.raises(sojourn.ConfigError, match=r"init\(url\) or set SOJOURN_URL"):
        sojourn.init()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dialect": "klingon"}, "dialect 'klingon' is unknown"),
        ({"probe_timeout_s": -1}, "probe_timeout_s is -1"),
        ({"probe_timeout_s": float("nan")}, "probe_timeout_s is nan"),
        ({"hosts": "gpu:8000"}, "expected a list"),
        ({"hosts": ["http://"]}, "does not name a host"),
        ({"hosts": ["gpu:many"]}, "does not name a host"),
        ({"api_key": "ключ"}, "API key"),
        ({"api_key": "a\nb"}, "API key"),
    ],
)
def test_bad_arguments_are_refused_with_the_reason(arguments, words):
    with pytest.raises(sojourn.ConfigError, match=words):
        sojourn.init("http://127.0.0.1:1", **arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SOJOURN_DISABLED", "perhaps"),
        ("SOJOURN_PROGRAM_ID", "x" * 257),
        ("SOJOURN_DIALECT", "klingon"),
        ("SOJOURN_URL", "nowhere"),
    ],
)
def test_bad_variables_are_refused_by_init(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(sojourn.ConfigError):
        sojourn.init(None if name == "SOJOURN_URL" else "http://127.0.0.1:1")


def test_arguments_win_over_the_environment():
    environment = Environment.read(
        {"SOJOURN_URL": "http://env:1", "SOJOURN_API_KEY": "env", "SOJOURN_DIALECT": "vllm"}
    )
    config = Config.resolve("http://arg:2", api_key="arg", dialect="sojourn", environment=environment)
    assert (config.url, config.api_key, config.dialect) == ("http://arg:2", "arg", "sojourn")
    config = Config.resolve(None, environment=environment)
    assert (config.url, config.api_key, config.dialect) == ("http://env:1", "env", "vllm")


@pytest.mark.parametrize("word", ["0", "false", "no", "off", ""])
def test_switches_can_be_off(word):
    assert Environment.read({"SOJOURN_DISABLED": word}).disabled is False


def test_the_openai_key_is_never_taken_for_events():
    assert Environment.read({"OPENAI_API_KEY": "secret"}).api_key is None
