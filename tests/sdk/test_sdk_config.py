"""Settings fail at the door or never."""

from __future__ import annotations

import traceback

import pytest
import sojourn
from sdk_records import ask
from sojourn.config import Config, Environment
from sojourn.testing import FakeServer

EMPTY = Environment()


@pytest.mark.parametrize(
    ("url", "root"),
    [
        *((f"http://127.0.0.1:8000{end}", "http://127.0.0.1:8000") for end in ("", "/", "/v1", "/v1/")),
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


NO_URLS = (
    "localhost",
    "x:99999",
    "ftp://x",
    "http://",
    "http://x:port",
    "http://x:99999",
    "/v1",
    "http://[::1",
)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"url": None}, r"init\(url\) or set SOJOURN_URL"),
        *(({"url": url}, "expected|name a host|not a URL") for url in NO_URLS),
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
        sojourn.init(**{"url": "http://127.0.0.1:1", **arguments})


BAD_VARIABLES = {"DISABLED": "perhaps", "PROGRAM_ID": "x" * 257, "DIALECT": "klingon", "URL": "nowhere"}


@pytest.mark.parametrize("name", BAD_VARIABLES)
def test_bad_variables_are_refused_by_init(name, monkeypatch):
    monkeypatch.setenv(f"SOJOURN_{name}", BAD_VARIABLES[name])
    with pytest.raises(sojourn.ConfigError):
        sojourn.init(None if name == "URL" else "http://127.0.0.1:1")


def test_arguments_win_over_the_environment():
    environment = Environment.read(
        {"SOJOURN_URL": "http://env:1", "SOJOURN_API_KEY": "env", "SOJOURN_DIALECT": "vllm"}
    )
    config = Config.resolve("http://arg:2", api_key="arg", dialect="sojourn", environment=environment)
    assert (config.url, config.api_key, config.dialect) == ("http://arg:2", "arg", "sojourn")
    config = Config.resolve(None, environment=environment)
    assert (config.url, config.api_key, config.dialect) == ("http://env:1", "env", "vllm")


def test_switches_can_be_off_and_the_openai_key_is_never_taken_for_events():
    for word in ("0", "false", "no", "off", ""):
        assert Environment.read({"SOJOURN_DISABLED": word}).disabled is False
    assert Environment.read({"OPENAI_API_KEY": "secret"}).api_key is None


# -- proxies without a library, missing certificates: an agent that did not call init() is not disturbed


AGENT = """
import sojourn
for _ in range(2):
    with sojourn.program("p"), sojourn.tool_call("t"):
        assert sojourn.request_parts() == ({}, {})
assert sojourn.flush() and sojourn.stats().dialect is None
"""
CLEAR = {name: "" for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")}


def test_a_hostile_environment_never_reaches_an_agent_that_did_not_call_init(python):
    env = {**CLEAR, "all_proxy": "socks5://127.0.0.1:9", "SOJOURN_URL": "http://127.0.0.1:9"}
    said = python(AGENT, env=env)
    assert said.stderr.count("sojourn stays off") == 1


def test_a_failed_init_leaves_the_session_before_it_alone(online, monkeypatch):
    for name, value in {**CLEAR, "http_proxy": "ftp://x"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(sojourn.ConfigError):
        sojourn.init("http://127.0.0.1:9")
    with sojourn.program("p"):
        pass
    assert sojourn.flush(60)
    assert len(online.events()) == 2


# -- One gateway that serves several providers at one port, each below a path of its own


def test_a_replica_at_another_path_gets_the_program_and_no_events(server: FakeServer) -> None:
    sojourn.init(server.url, hosts=[server.url + "/replica/v1"], dialect="sojourn")
    sojourn.runtime.session().event_sender._linger_s = 30
    with sojourn.program() as p:
        ask(server.url + "/replica/v1")
        ask(server.url + "/v1")
    replica, home = server.requests
    assert replica.context.program_id == home.context.program_id == p.id
    assert (replica.events, len(home.events)) == ([], 1)


@pytest.mark.parametrize(
    ("url", "hosts", "path", "listed"),
    [
        ("http://gw", [], "/anything", "gw:80"),
        ("http://gw/v1", [], "/anything", "gw:80"),
        ("http://gw/llm/v1", [], "/llm/v1/completions", "gw:80/llm"),
        ("http://gw/llm/v1", [], "/llm", "gw:80/llm"),
        ("http://gw/llm/v1", [], "/llm2/v1/completions", None),
        ("http://gw/llm/v1", [], "/LLM/v1/completions", None),
        ("http://gw/llm/v1", [], "/v1/completions", None),
        ("http://gw/a/b", [], "/a/b/v1/completions", "gw:80/a/b"),
        ("http://gw/a/b", [], "/a/v1/completions", None),
        ("http://gw/a%20b", [], "/a b/v1/completions", "gw:80/a b"),
        ("http://gw/a", ["gw"], "/a/v1/completions", "gw:80/a"),
        ("http://gw/a", ["gw"], "/b/v1/completions", "gw:80"),
        ("http://gw/a", ["gw:80/b/v1"], "/b/v1/completions", "gw:80/b"),
        ("http://gw/a", ["http://gw/b"], "/c/v1/completions", None),
        ("http://other/a", ["http://gw/"], "/c/v1/completions", "gw:80"),
        ("http://other", [], "/v1/completions", None),
    ],
)
def test_the_entry_of_a_request_is_that_with_the_longest_path(
    url: str, hosts: list[str], path: str, listed: str | None
) -> None:
    assert Config.resolve(url, hosts=hosts, environment=Environment()).listed("gw:80", path) == listed
