"""What agents write on a command line, and the command that will take the time."""

from __future__ import annotations

import pytest
from sojourn.shell_command import command_class, main_head

LINES = {
    "ls -la": "ls",
    "cd /repo && pytest -q 2>&1 | tail -5": "pytest",
    "A=1 timeout 60 python -m unittest | tee out.txt": "python",
    "echo hi": "echo",
    "cat <<'EOF' > x.py\nimport os; print(1)\nEOF\npython x.py": "python",
    "sed -i 's/a;b/c/' f.py && git diff": "git",
    'grep -rn "it\'s" . ; make -j4 > log 2>&1': "make",
    "/usr/local/bin/npm test &": "npm",
    "if [ -f a ]; then rm a; fi": "rm",
    "for i in 1 2; do sleep 1; done": "sleep",
    "(cd a && npm test)": "npm",
    "find . -name '*.py' | xargs wc -l": "xargs",
    "cat a | python b.py": "python",
    "echo 'never closed": "echo",
    **dict.fromkeys(("", "   ", "FOO=bar")),
}


@pytest.mark.parametrize(("line", "head"), LINES.items())
def test_heads(line: str, head: str | None) -> None:
    assert main_head(line) == head


def test_long_lines_are_cut_and_quick() -> None:
    assert main_head("x" * 10_000) == "x" * 64
    assert main_head("<<" * 100_000) is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("cd /srv && pytest -k secret", "pytest"),
        ("A=secret ./run_7.sh | tail", "run_7.sh"),
        ("g++ x.cc", "g++"),
        ("'Alice Smith' --salary", None),
        ("$(cat secret)", None),
        ('{"k": "secret"}', None),
        ("alice@example.com", None),
        ("", None),
    ],
)
def test_only_what_looks_like_a_programs_name_is_a_class(line, told):
    assert command_class(line) == told
