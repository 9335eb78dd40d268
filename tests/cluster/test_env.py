"""`overland env`: the set-up script of each site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overland.cli.main import app
from overland.cluster.script import render_setup
from overland.cluster.site import load_site, site_files
from tests.cluster.scripts import assert_good_bash

SITES = sorted(site_files())


@pytest.mark.parametrize("site", SITES)
def test_every_sites_setup_is_good_bash(site: str) -> None:
    assert_good_bash(render_setup(load_site(site)))


@pytest.mark.parametrize("site", SITES)
def test_amd_gets_torch_from_amds_index_and_others_do_not(site: str) -> None:
    text = render_setup(load_site(site))
    from_rocm = re.findall(r"install 'torch.*whl/rocm", text)
    assert bool(from_rocm) == (load_site(site).facts.accelerator == "amd")


@pytest.mark.parametrize("site", SITES)
def test_environment_and_caches_lie_on_scratch(site: str) -> None:
    text = render_setup(load_site(site))
    for name in ("HF_HOME", "PIP_CACHE_DIR", "TORCH_HOME", "TORCH_EXTENSIONS_DIR"):
        assert f'export {name}="$SCRATCH_ROOT/' in text
    assert 'env="$SCRATCH_ROOT/envs/overland"' in text


def test_frontiers_setup_has_modules_plugin_and_flash_attention() -> None:
    text = render_setup(load_site("frontier"))
    assert "module load cpe/26.03 craype-accel-amd-gfx90a rocm/7.1.1 rccl-net-plugin" in text
    assert "github.com/ROCm/aws-ofi-rccl" in text
    assert 'GPU_ARCHS="gfx90a"' in text
    assert "conda-pack" in text


def test_only_a_conda_environment_is_packed(tmp_path: Path) -> None:
    """conda-pack refuses others, which would end the script before it is done."""
    site = tmp_path / "own.toml"
    site.write_text(
        'description = "own"\naccelerator = "none"\n[disk]\nnode_local = "/tmp"\nscratch = "/s"\n'
    )
    assert "conda" not in render_setup(load_site(str(site)))
    site.write_text(site.read_text() + '[setup]\npython = "conda"\nmodules = ["conda"]\n')
    assert "bin/conda-pack" in render_setup(load_site(str(site)))


def test_wheels_are_for_the_rocm_whose_module_jobs_load() -> None:
    frontier = load_site("frontier")
    (module,) = (one for one in frontier.facts.modules if one.startswith("rocm/"))
    assert f"rocm=${{ROCM:-{'.'.join(module[5:].split('.')[:2])}}}" in render_setup(frontier)


@pytest.mark.parametrize("site", SITES)
def test_what_a_job_needs_is_good_bash_and_installs_nothing(site: str) -> None:
    done = CliRunner().invoke(app, ["env", site, "--job"])
    assert_good_bash("#!/bin/bash\n" + done.stdout)
    assert not re.search(r"pip|conda|git clone|mkdir", done.stdout)
    assert all(f"export {name}=" in done.stdout for name in load_site(site).facts.environment)


def test_the_verb_prints_the_script_and_nothing_else() -> None:
    done = CliRunner().invoke(app, ["env", "generic-amd"])
    assert done.exit_code == 0
    assert done.stdout == render_setup(load_site("generic-amd"))


def test_without_a_site_the_sites_are_listed() -> None:
    assert all(site in CliRunner().invoke(app, ["env"]).stdout for site in SITES)


def test_an_unknown_site_is_one_sentence() -> None:
    done = CliRunner().invoke(app, ["env", "frontir"])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "did you mean frontier?" in done.stderr
