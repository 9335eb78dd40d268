"""Sites: what their files say, how a user adds one, and how long a job may last."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from overland.cluster.job import choose_walltime, parse_walltime
from overland.cluster.site import load_site, read_site, site_files
from overland.config.errors import ConfigError
from overland.errors import ClusterError

MINE = """
description = "ours"
accelerator = "nvidia"

[slurm]
devices_per_node = 2

[environment]
# Our network.
NCCL_SOCKET_IFNAME = "ib0"
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a folder of this test's own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("nodes", "time"),
    [(1, "02:00:00"), (91, "02:00:00"), (92, "06:00:00"), (183, "06:00:00"), (184, "12:00:00"),
     (9000, "12:00:00")],
)  # fmt: skip
def test_frontiers_walltime_follows_the_number_of_nodes(nodes: int, time: str) -> None:
    assert choose_walltime(load_site("frontier"), nodes, None, None) == time


def test_a_partition_has_limits_of_its_own() -> None:
    site = load_site("frontier")
    assert choose_walltime(site, 64, None, "extended") == "24:00:00"
    with pytest.raises(ClusterError, match=r"partition extended, allows at most 64 nodes, not 65"):
        choose_walltime(site, 65, None, "extended")


def test_too_long_a_time_is_refused_with_the_limit_and_a_way_out() -> None:
    site = load_site("frontier")
    with pytest.raises(ClusterError) as refused:
        choose_walltime(site, 64, "06:00:00", None)
    assert str(refused.value) == (
        "--time 06:00:00: frontier allows 02:00:00 for 64 nodes, and --partition extended "
        "allows 24:00:00 up to 64 nodes; use --sessions for a chain of jobs"
    )
    assert choose_walltime(site, 64, "01:59:00", None) == "01:59:00"


def test_where_no_limit_is_known_the_time_is_asked_for() -> None:
    site = load_site("perlmutter")
    with pytest.raises(
        ClusterError, match=r"perlmutter: the walltime limit .* give --time HH:MM:SS"
    ):
        choose_walltime(site, 1, None, None)
    assert choose_walltime(site, 1, "48:00:00", None) == "48:00:00"


def test_walltimes_are_read_as_slurm_writes_them() -> None:
    assert parse_walltime("1-02:03:04") == 93784
    assert parse_walltime("1-02:03") == 93780
    assert parse_walltime("1-02") == 93600
    assert parse_walltime("02:03:04") == 7384
    assert parse_walltime("90:05") == 5405
    assert parse_walltime("90") == 5400
    for wrong in ("2h", "02:60:00", "1:02:03:04", "1-", "-5", ""):
        with pytest.raises(ClusterError, match="expected minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM"):
            parse_walltime(wrong)


def test_scripts_have_walltimes_in_one_form() -> None:
    site = load_site("perlmutter")
    assert choose_walltime(site, 1, "90", None) == "01:30:00"
    assert choose_walltime(site, 1, "2-1", None) == "49:00:00"


def test_every_site_in_the_package_is_valid_and_says_what_it_is() -> None:
    generic = ["generic-amd", "generic-cpu", "generic-nvidia"]
    assert sorted(site_files()) == ["frontier", *generic, "laptop", "perlmutter", "s3df"]
    for name, path in site_files().items():
        site = load_site(name)
        assert path.read_text().startswith("# ")
        assert site.facts.description
        for limit in site.facts.slurm.limits:
            parse_walltime(limit.time)


def test_every_variable_of_a_site_has_a_reason() -> None:
    """Its own comment, or that of the variables it stands below without a gap."""
    for name, path in site_files().items():
        rows = path.read_text().splitlines()
        for variable in load_site(name).facts.environment:
            line = next(i for i, row in enumerate(rows) if row.startswith(f"{variable} ="))
            above = line - 1
            while rows[above] and not rows[above].startswith(("#", "[")):
                above -= 1
            assert rows[above].startswith("#"), f"{name}: {variable}"


@pytest.mark.parametrize("folder", ["sites", "home/.config/overland/sites"])
def test_a_user_adds_a_site_with_one_file(elsewhere: Path, folder: str) -> None:
    path = elsewhere / folder / "ours.toml"
    path.parent.mkdir(parents=True)
    path.write_text(MINE)
    site = load_site("ours")
    assert site.facts.slurm.devices_per_node == 2
    assert site.reasons == {"NCCL_SOCKET_IFNAME": ["Our network."]}
    assert load_site(str(path)) == site
    assert "ours" in site_files()


def test_a_users_site_stands_before_the_packages(elsewhere: Path) -> None:
    (elsewhere / "sites").mkdir()
    (elsewhere / "sites" / "frontier.toml").write_text(MINE)
    assert load_site("frontier").facts.description == "ours"


def test_an_unknown_site_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no such site \(sites: .*did you mean frontier"):
        load_site("fronteir")
    with pytest.raises(ConfigError, match="no such site"):
        load_site("not/there.toml")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[slurm]\ndevices_per_nod = 4",
         "ours.toml:4: slurm.devices_per_nod = 4: unknown key; did you mean devices_per_node?"),
        ("[slurm]\ndevices_per_node = \"4\"",
         'ours.toml:4: slurm.devices_per_node = "4": expected a positive whole number'),
        ("[slurm]\nlimits = [{ nodez = 4, time = \"01:00:00\" }]",
         "ours.toml:4: slurm.limits.0.nodez = 4: unknown key; did you mean nodes?"),
        ("[slurm.partitions.a]\ndevice_per_node = 4",
         "ours.toml:4: slurm.partitions.a.device_per_node = 4: unknown key; did you mean "
         "devices_per_node?"),
        ("module = [\"rocm\"]",
         'ours.toml:3: module = ["rocm"]: unknown key; did you mean modules?'),
        ("[environment]\nHF_TOKEN = \"hf_x\"",
         "ours.toml:4: environment.HF_TOKEN: looks like a secret, which must not be in a file; "
         "pass it by name with `--env`"),
        ("[environment]\nA = \"$(rm -rf x)\"",
         "ours.toml:4: environment.A: expected plain text and $NAMES; a value must not break its "
         "quotes or run commands"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_site_is_told_in_one_line(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_site(f'description = "ours"\naccelerator = "amd"\n{line}\n', "ours.toml", "ours")
    assert str(refused.value) == message


def test_what_a_site_must_say_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="description: is missing"):
        read_site('accelerator = "amd"\n', "ours.toml", "ours")


def test_sites_and_templates_are_in_the_wheel() -> None:
    """Hatch takes every file of the package that git does not ignore."""
    root = Path(__file__).parents[2]
    build = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"] == {"packages": ["overland"]}
    ignored = (root / ".gitignore").read_text()
    assert ".toml" not in ignored
    assert ".j2" not in ignored
