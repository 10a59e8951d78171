"""A cache of the `datasets` library as a download leaves it, made without one."""

import pathlib
import shutil

import pytest


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """cached(hub id, configuration, {split: rows}): the set is then in the cache, which is empty at first."""
    datasets = pytest.importorskip("datasets")
    naming = pytest.importorskip("datasets.naming")
    home = tmp_path / "hub"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", home)
    datasets.disable_progress_bars()

    def put(hub, config, splits):
        name = naming.camelcase_to_snakecase(hub.split("/")[1])
        files = {}
        for split, rows in splits.items():
            files[split] = str(tmp_path / f"{name}-{config}-{split}.parquet")
            datasets.Dataset.from_list(rows).to_parquet(files[split])
        made = str(tmp_path / "made")
        with monkeypatch.context() as patch:
            patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
            builder = datasets.load_dataset_builder("parquet", config, data_files=files, cache_dir=made)
            builder.download_and_prepare()
        place = home / f"{hub.split('/')[0]}___{name}" / config / "0.0.0" / "abc"
        shutil.copytree(builder.cache_dir, place)
        for file in place.glob("parquet-*"):
            file.rename(place / file.name.replace("parquet", name, 1))
        info = pathlib.Path(place, "dataset_info.json")
        info.write_text(info.read_text().replace('"parquet"', f'"{name}"'))

    return put
