"""The shipped tables, and files of tables in general."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest

from lab.calibration import export_aiconfigurator as exporter
from prism.errors import ConfigError
from prism_sim.costs.catalog import cost_model, cost_table, model_shape
from prism_sim.costs.gpus import gpu_spec
from prism_sim.costs.grid import SHIPPED, Grid, read_grid, shipped_grid, write_grid
from prism_sim.costs.model import PromptChunk
from prism_sim.costs.roofline import roofline
from prism_sim.costs.table import TableCost
from tests.costs.tables import BENT

GRID = Grid(package="p", version="1", license="Apache-2.0", tables=(BENT,))


def test_the_shipped_tables_name_their_source_and_licence() -> None:
    grid = shipped_grid()
    assert (grid.package, grid.license) == ("aiconfigurator-core", "Apache-2.0")
    assert all(grid.version in table.source for table in grid.tables)
    assert {table.gpu for table in grid.tables} == set(exporter.SYSTEMS)


def test_every_combination_has_a_table_but_the_one_the_readme_names() -> None:
    shipped = {(table.gpu, table.model, table.tp) for table in shipped_grid().tables}
    wanted = {(g, s.name, tp) for g, s, tp in exporter.combinations(list(exporter.SYSTEMS))}
    assert {key[:2] for key in wanted - shipped} == {("a100-80", "meta-llama/Llama-3.2-1B")}
    assert not shipped - wanted


def test_the_shipped_file_is_what_writing_its_tables_gives(tmp_path: Path) -> None:
    write_grid(tmp_path / "again.json.gz", shipped_grid())
    again, shipped = (
        msgspec.json.decode(gzip.decompress(path.read_bytes()))
        for path in (tmp_path / "again.json.gz", SHIPPED)
    )
    assert again == shipped


@pytest.mark.parametrize("model", ["Llama-3.2-3B", "Llama-3.1-8B", "Qwen3-32B", "llama-13b"])
@pytest.mark.parametrize("gpu", ["a100-80", "h100", "h200"])
def test_measured_steps_are_near_the_roofline(gpu: str, model: str) -> None:
    """Compares two independent sources: within a factor of 2 where kernels are large."""
    grid = cost_model(gpu, model, 2, host_s=0.0)
    bound = roofline(gpu_spec(gpu), model_shape(model), 2)
    assert cost_table(gpu, model, 2).source != bound.source
    for chunk, batch, context in ((PromptChunk(4096), 0, 0), (PromptChunk(0), 64, 64 * 1000)):
        chunks = (chunk,) if chunk.tokens else ()
        ratio = grid.step_s(chunks, batch, context) / TableCost(bound).step_s(
            chunks, batch, context
        )
        assert 0.5 < ratio < 2.0


def test_models_of_one_geometry_share_a_table_and_others_fall_back() -> None:
    assert cost_table("h100", "Llama-3.3-70B", 4) is cost_table("h100", "Llama-3.1-70B", 4)
    assert cost_table("h100", "Llama-2-7B") is cost_table("h100", "llama-7b")
    assert cost_table("h100", "Qwen3-32B") is not cost_table("h100", "Qwen3-32B-FP8")
    assert cost_table("a100-40", "Llama-3.1-8B").source == "roofline"
    assert cost_table("h100", "opt-6.7b").source == "roofline"


def test_a_file_of_tables_is_read_as_written(tmp_path: Path) -> None:
    for name in ("tables.json", "tables.json.gz"):
        write_grid(tmp_path / name, GRID)
        assert read_grid(tmp_path / name) == GRID


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is not a file of cost tables"),
        (b"{}", "tables"),
        (msgspec.json.encode(GRID).replace(b'"host_s":0.05', b'"host_s":"x"'), "host_s"),
        (
            msgspec.json.encode(GRID).replace(b'"tp":1', b'"tp":0'),
            r"tables\.json: .*tp must be > 0",
        ),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "tables.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read_grid(path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json"):
        read_grid(tmp_path / "none.json")


def test_tables_of_the_users_own_go_first(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    mine = msgspec.structs.replace(BENT, gpu="h100", model="Llama-3.1-8B")
    write_grid(path, msgspec.structs.replace(GRID, tables=(mine, BENT)))
    assert cost_model("g", "m", files=(path,)).decode_s(4, 200) == TableCost(BENT).decode_s(4, 200)
    own = cost_model("h100", "Llama-3.1-8B", files=(path,))
    assert own.decode_s(4, 200) == TableCost(mine).decode_s(4, 200)
    shipped = cost_model("h100", "Llama-3.1-8B", 2, files=(path,))
    assert shipped.decode_s(4, 200) == cost_model("h100", "Llama-3.1-8B", 2).decode_s(4, 200)
