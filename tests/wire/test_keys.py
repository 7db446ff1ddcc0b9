from __future__ import annotations

from pathlib import Path

import pytest
from zmq.auth.certs import create_certificates, load_certificate

from ppstream.core.errors import ConfigError
from ppstream.wire.keys import (
    FILE_BYTES_MAX,
    ROBOTS_MAX,
    allow,
    client_keys,
    main,
    make_pair,
    public_half,
    server_keys,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the keys of a server and of one robot, which its list allows."""
    make_pair("server", tmp_path)
    allow(tmp_path / "allowed", "arm", make_pair("arm", tmp_path))
    return tmp_path


def public_in(file: Path) -> bytes:
    return load_certificate(file)[0]


def secret_in(file: Path) -> bytes:
    secret = load_certificate(file)[1]
    assert secret is not None
    return secret


def test_a_pair_is_made_once_and_its_secret_is_its_owners_alone(tmp_path: Path) -> None:
    public = make_pair("arm", tmp_path)
    secret = tmp_path / "arm.secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert load_certificate(secret)[0] == public == public_half(secret_in(secret))
    with pytest.raises(ConfigError, match="cannot be made"):
        make_pair("arm", tmp_path)
    assert load_certificate(tmp_path / "arm.public") == (public, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arm.public", "arm.secret"]


def test_both_ends_read_what_the_tool_wrote(folder: Path) -> None:
    robot = client_keys(folder / "arm.secret", folder / "server.public")
    server = server_keys(folder / "server.secret", folder / "allowed")
    assert server is not None
    assert server.allowed == {public_half(robot.secret): "arm"}
    assert robot.server == public_half(server.secret)


@pytest.mark.parametrize("text", ["{}\n", 'public-key = "x"\nsecret-key = "{}"\n'])
def test_no_secret_shows_in_a_traceback_or_log(folder: Path, text: str) -> None:
    secret = secret_in(folder / "arm.secret").decode()
    keys = client_keys(folder / "arm.secret", folder / "server.public")
    server = server_keys(folder / "arm.secret", folder / "allowed")
    assert secret not in f"{keys!r} {server!r} {keys} {server}"
    broken = folder / "broken.secret"
    broken.write_text(text.format(secret[:-1] + "~"))
    broken.chmod(0o600)
    with pytest.raises(ConfigError) as raised:
        client_keys(broken, folder / "server.public")
    assert secret[:20] not in str(raised.value)


def test_files_with_nothing_but_the_key_are_read(folder: Path) -> None:
    files = [
        folder / f"{name}.{half}" for name in ("arm", "server") for half in ("secret", "public")
    ]
    before = client_keys(files[0], files[3]), server_keys(files[2], folder / "allowed")
    for file in files:
        file.write_bytes((secret_in(file) if file.suffix == ".secret" else public_in(file)) + b"\n")
    assert (client_keys(files[0], files[3]), server_keys(files[2], folder / "allowed")) == before


def test_certificates_of_other_zeromq_tools_are_read(folder: Path) -> None:
    public_file, secret_file = create_certificates(folder, "other", {"lab": "north"})
    Path(secret_file).chmod(0o600)
    public, secret = load_certificate(secret_file)
    assert client_keys(secret_file, public_file) == (secret, public)


def test_the_public_half_is_nosecret_in(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.public: the public half"):
        server_keys(folder / "server.public", folder / "allowed")


def test_a_folder_that_cannot_be_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no keys can be made there: "):
        make_pair("arm", folder / "arm.public" / "keys")


def test_a_secret_that_others_can_read_is_refused(folder: Path) -> None:
    (folder / "arm.secret").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        client_keys(folder / "arm.secret", folder / "server.public")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x" * 39,
        "x" * 41,
        "#" * 40,
        "é" * 40,
        "x" * 39 + "\0",
        "x" * (1 << 20),
        "public-key",
        "public-key = x",
    ],
)
def test_what_is_no_key_is_refused(folder: Path, text: str) -> None:
    file = folder / "wrong.public"
    file.write_text(text)
    with pytest.raises(ConfigError, match="no key"):
        client_keys(folder / "arm.secret", file)


def test_a_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.secret: cannot be read"):
        server_keys(folder / "gone.secret", folder / "allowed")


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("", "got 0 robots"),
        ("# nobody yet\n\n", "got 0 robots"),
        ("arm\n", "got 1 words"),
        ("arm KEY extra\n", "got 3 words"),
        ("../arm KEY\n", "letters, digits"),
        ("arm nokey\n", "allowed:1: no key"),
    ],
)
def test_a_malformed_allow_list_is_refused_with_its_line(
    folder: Path, lines: str, problem: str
) -> None:
    key = public_in(folder / "arm.public").decode()
    (folder / "allowed").write_text(lines.replace("KEY", key))
    with pytest.raises(ConfigError, match=problem):
        server_keys(folder / "server.secret", folder / "allowed")


@pytest.mark.parametrize(("robots", "fits"), [(ROBOTS_MAX, True), (ROBOTS_MAX + 1, False)])
def test_an_allow_list_has_a_largest_size(folder: Path, robots: int, fits: bool) -> None:
    lines = [f"r{number} {number:08d}{'0' * 32}\n" for number in range(robots)]
    (folder / "allowed").write_text("".join(lines))
    if fits:
        server = server_keys(folder / "server.secret", folder / "allowed")
        assert server is not None
        assert len(server.allowed) == robots
    else:
        with pytest.raises(ConfigError, match=f"want 1 to {ROBOTS_MAX}"):
            server_keys(folder / "server.secret", folder / "allowed")


def test_a_robot_is_allowed_once(folder: Path) -> None:
    key = public_in(folder / "arm.public")
    other = make_pair("other", folder)
    for name, taken in (("arm", other), ("second", key)):
        with pytest.raises(ConfigError, match="already"):
            allow(folder / "allowed", name, taken)


@pytest.mark.parametrize("text", ["", "# nobody", "arm {}", "# one\narm {}\n"])
def test_a_robot_gets_a_line_of_its_own_in_a_list_as_editors_leave_it(
    folder: Path, text: str
) -> None:
    arm, other = public_in(folder / "arm.public"), make_pair("other", folder)
    (folder / "allowed").write_text(text.format(arm.decode()))
    allow(folder / "allowed", "other", other)
    server = server_keys(folder / "server.secret", folder / "allowed")
    assert server is not None
    assert server.allowed == ({arm: "arm"} if "arm" in text else {}) | {other: "other"}


def test_a_list_that_is_full_or_cannot_be_written_is_named(folder: Path) -> None:
    lines = [f"r{number} {number:08d}{'0' * 32}\n" for number in range(ROBOTS_MAX)]
    (folder / "allowed").write_text("".join(lines))
    key = make_pair("other", folder)
    for path, problem in (("allowed", "4096 robots"), ("gone/allowed", "cannot be written: No s")):
        with pytest.raises(ConfigError, match=f"{path}: .*{problem}"):
            allow(folder / path, "other", key)


def test_the_tool_makes_what_both_ends_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "server", "--folder", str(tmp_path)]) == 0
    assert main(["new", "arm", "--folder", str(tmp_path)]) == 0
    assert main(["allow", str(tmp_path / "list"), "arm", str(tmp_path / "arm.public")]) == 0
    capsys.readouterr()
    assert main(["public", str(tmp_path / "arm.secret")]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed == public_in(tmp_path / "arm.public").decode()
    assert (tmp_path / "list").read_text() == f"arm {printed}\n"
    assert main(["new", "arm", "--folder", str(tmp_path)]) == 11
    assert "cannot be made" in capsys.readouterr().err
    assert main(["allow", str(tmp_path / "list"), "other", "no-key"]) == 11
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(("over", "fits"), [(-1, True), (0, True), (1, False)])
def test_a_key_file_has_a_largest_size(folder: Path, over: int, fits: bool) -> None:
    lines = (folder / "allowed").read_text()
    (folder / "allowed").write_text(lines + "#" * (FILE_BYTES_MAX - len(lines) + over))
    if fits:
        assert server_keys(folder / "server.secret", folder / "allowed") is not None
    else:
        with pytest.raises(ConfigError, match="larger than"):
            server_keys(folder / "server.secret", folder / "allowed")
