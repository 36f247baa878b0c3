"""Secrets are found where the configuration says, and are never shown."""

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as trials
from hypothesis import strategies as st

from receiver.references import (
    ENV_FILE_BYTES_MAX,
    SECRET_BYTES_MAX,
    References,
    Unresolved,
    check,
    read_bytes,
    read_env_file,
)

# The first text of a fresh checkout builds tables of Unicode, and machines differ in speed.
STEADY = trials(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SECRET = "whsec_do_not_show_this"


def references(directory: Path, **environment: str) -> References:
    return References(directory, environment)


def env_file(tmp_path: Path, text: str) -> tuple[dict[str, str], list[str]]:
    path = tmp_path / ".env"
    path.write_bytes(text.encode())
    return read_env_file(path)


def test_env_reference_is_taken_from_the_environment(tmp_path: Path) -> None:
    assert references(tmp_path, A=SECRET).resolve("env:A") == (SECRET.encode(), None)


def test_environment_comes_before_the_env_file(tmp_path: Path) -> None:
    both = References(tmp_path, {"A": "outer"}, {"A": "inner", "B": "inner"}, tmp_path / ".env")

    assert both.resolve("env:A")[0] == b"outer"
    assert both.resolve("env:B")[0] == b"inner"


def test_file_reference_is_relative_to_the_config(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(SECRET)

    assert references(tmp_path).resolve("file:key") == (SECRET.encode(), None)
    assert references(Path("/")).resolve(f"file:{tmp_path}/key") == (SECRET.encode(), None)


def test_credential_is_read_from_the_credentials_directory(tmp_path: Path) -> None:
    (tmp_path / "stripe").write_text(SECRET + "\n")

    found = references(Path("/"), CREDENTIALS_DIRECTORY=str(tmp_path)).resolve("credential:stripe")

    assert found == (SECRET.encode(), None)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_one_line_end_of_a_file_is_left_out_without_a_warning(tmp_path: Path, end: str) -> None:
    (tmp_path / "key").write_bytes((SECRET + end).encode())

    assert references(tmp_path).resolve("file:key") == (SECRET.encode(), None)


@pytest.mark.parametrize(
    "text", [f" {SECRET}\n", f"{SECRET}\n\n", f"{SECRET}\t", f"\ufeff{SECRET}"]
)
def test_white_space_around_a_secret_is_stripped_with_a_warning(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_bytes(text.encode())

    value, warning = references(tmp_path).resolve("file:key")

    assert value == SECRET.encode()
    assert warning == "file:key: white space around the secret is left out; store it without"


def test_white_space_in_a_variable_is_stripped_with_a_warning(tmp_path: Path) -> None:
    value, warning = references(tmp_path, A=f" {SECRET}\n").resolve("env:A")

    assert value == SECRET.encode()
    assert warning is not None


@pytest.mark.parametrize("blank", ["", " ", "\n", "\t\r\n"])
def test_an_empty_value_is_a_problem(tmp_path: Path, blank: str) -> None:
    (tmp_path / "key").write_text(blank)

    with pytest.raises(Unresolved, match=r"^env:A is empty \(store the secret there\)$"):
        references(tmp_path, A=blank).resolve("env:A")
    with pytest.raises(Unresolved, match=r"^file:key is empty"):
        references(tmp_path).resolve("file:key")


def test_a_missing_variable_names_the_env_file_to_put_it_in(tmp_path: Path) -> None:
    with pytest.raises(Unresolved) as caught:
        References(tmp_path, {}, {}, tmp_path / ".env").resolve("env:STRIPE_WEBHOOK_SECRET")

    assert str(caught.value) == (
        "environment variable STRIPE_WEBHOOK_SECRET is not set (set it, or put it in .env)"
    )


def test_a_missing_variable_without_env_file_says_that_there_may_be_one(tmp_path: Path) -> None:
    with pytest.raises(Unresolved, match="put it in a file named by env_file"):
        references(tmp_path).resolve("env:A")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unresolved) as caught:
        references(tmp_path).resolve("file:key")

    assert str(caught.value) == f"{tmp_path}/key: no such file (create it, or correct the path)"


def test_a_missing_credentials_directory_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(Unresolved) as caught:
        references(tmp_path).resolve("credential:stripe")

    assert "$CREDENTIALS_DIRECTORY is not set" in str(caught.value)
    assert "LoadCredential=stripe:" in str(caught.value)


def test_a_missing_credential_names_the_setting_of_the_unit(tmp_path: Path) -> None:
    with pytest.raises(Unresolved, match=r"is LoadCredential=stripe set in the unit\?"):
        references(tmp_path, CREDENTIALS_DIRECTORY=str(tmp_path)).resolve("credential:stripe")


def test_a_directory_is_no_secret(tmp_path: Path) -> None:
    with pytest.raises(Unresolved, match="is not a regular file"):
        references(tmp_path.parent).resolve(f"file:{tmp_path.name}")


def test_a_named_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(Unresolved, match="is not a regular file"):
        references(tmp_path).resolve("file:pipe")


def test_refusing_a_file_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))

    for _ in range(20):
        with pytest.raises(Unresolved):
            read_bytes(tmp_path, 10)

    assert len(os.listdir("/proc/self/fd")) == before


def test_an_unreadable_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(SECRET)
    (tmp_path / "key").chmod(0)
    user = os.geteuid()

    # Root may read every file, so it becomes another user for this.
    os.seteuid(user or 65_534)
    try:
        with pytest.raises(Unresolved, match="may not be read by this user"):
            references(tmp_path).resolve("file:key")
    finally:
        os.seteuid(user)


def test_a_file_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"a" * SECRET_BYTES_MAX)
    assert len(references(tmp_path).resolve("file:key")[0]) == SECRET_BYTES_MAX

    (tmp_path / "key").write_bytes(b"a" * (SECRET_BYTES_MAX + 1))
    with pytest.raises(Unresolved, match=f"is larger than {SECRET_BYTES_MAX} bytes"):
        references(tmp_path).resolve("file:key")


@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        f"v1,{SECRET}",
        f"env:{SECRET}",
        f"env:v1,{SECRET}",
        f"file:{SECRET}",
        f"credential:{SECRET}",
        f"ENV:{SECRET}",
        "hunter2/do_not_show_this=",
        "env:do_not_show_this/=",
        "env:",
        "env: do_not_show_this",
        "file:",
        "file:do_not_show_this\n",
        "credential:../do_not_show_this",
        "credential:..",
        "",
    ],
)
def test_what_is_no_reference_is_refused_without_repeating_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(Unresolved) as caught:
        references(tmp_path).resolve(text)

    assert "do_not_show_this" not in str(caught.value)


def test_a_plain_secret_with_a_version_before_it_is_told_to_lose_that() -> None:
    with pytest.raises(Unresolved, match="remove the leading 'v1,'"):
        check(f"v1,{SECRET}")


def test_no_words_of_a_resolver_hold_a_value(tmp_path: Path) -> None:
    resolver = References(tmp_path, {"A": SECRET}, {"B": SECRET}, tmp_path / ".env")

    assert SECRET not in repr(resolver)
    assert SECRET not in str(resolver)


def test_env_file_knows_comments_blank_lines_export_and_quotes(tmp_path: Path) -> None:
    variables, problems = env_file(
        tmp_path,
        "# a comment\n"
        "\n"
        "PLAIN=value\r\n"
        "  export EXPORTED = spaced  # a comment\n"
        "HASH=a#b\n"
        "SINGLE='a \"b\" \\n #c' # a comment\n"
        'DOUBLE="a \\"b\\"\\n#c\\\\"\n'
        "EMPTY=\n"
        "ONLY= # a comment\n"
        "EQUALS=a=b==\n"
        "AGAIN=first\n"
        "AGAIN=last\n",
    )

    assert problems == []
    assert variables == {
        "PLAIN": "value",
        "EXPORTED": "spaced",
        "HASH": "a#b",
        "SINGLE": 'a "b" \\n #c',
        "DOUBLE": 'a "b"\n#c\\',
        "EMPTY": "",
        "ONLY": "",
        "EQUALS": "a=b==",
        "AGAIN": "last",
    }


def test_white_space_within_quotes_of_an_env_file_is_kept_for_the_warning(tmp_path: Path) -> None:
    lines, _ = env_file(tmp_path, f'A=" {SECRET} "\n')

    value, warning = References(tmp_path, {}, lines).resolve("env:A")

    assert value == SECRET.encode()
    assert warning is not None


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (f"just {SECRET}", "is not KEY=VALUE"),
        (f"1A={SECRET}", "is not KEY=VALUE"),
        (f'A="{SECRET}', "a quote is not closed"),
        (f"A='{SECRET}' more", "a quote is not closed"),
    ],
)
def test_a_bad_line_is_named_by_its_number_alone(tmp_path: Path, line: str, wrong: str) -> None:
    variables, problems = env_file(tmp_path, f"B=1\n{line}\nC=2\n")

    assert variables == {"B": "1", "C": "2"}
    assert problems == [f"line 2 of {tmp_path}/.env: {wrong}; correct it, or begin it with #"]


def test_an_env_file_that_is_not_text_or_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"A=\xff\n")
    with pytest.raises(Unresolved, match=r"is not UTF-8 text \(byte 2\)"):
        read_env_file(tmp_path / ".env")

    (tmp_path / ".env").write_bytes(b"#" * (ENV_FILE_BYTES_MAX + 1))
    with pytest.raises(Unresolved, match="is larger than"):
        read_env_file(tmp_path / ".env")


@STEADY
@given(st.text(max_size=200))
def test_any_text_as_a_reference_is_resolved_or_refused(text: str) -> None:
    with contextlib.suppress(Unresolved):
        References(Path("/nonexistent"), {"A": SECRET}).resolve(text)


@STEADY
@given(st.binary(max_size=300))
def test_any_env_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, octets: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.env"
    path.write_bytes(octets)

    try:
        variables, problems = read_env_file(path)
    except Unresolved:
        return
    assert all(name.isidentifier() for name in variables)
    assert all("\n" not in problem for problem in problems)


def test_beside_a_running_service_its_credentials_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("receiver.references.SERVICE_CREDENTIALS", str(tmp_path))
    (tmp_path / "stripe").write_text(SECRET)

    assert references(Path("/")).resolve("credential:stripe") == (SECRET.encode(), None)
