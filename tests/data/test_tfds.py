"""TensorFlow Datasets in formats with random access, and what is not prepared: without a network."""

import numpy as np
import pytest

from mutualrl import data

tfds = pytest.importorskip("tensorflow_datasets")


@pytest.mark.parametrize("file_format, package", [("array_record", "array_record"), ("parquet", "pyarrow")])
def test_a_format_with_random_access_reads_in_stored_order(tmp_path, monkeypatch, file_format, package):
    pytest.importorskip(package)

    class Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        pkg_dir_path = tmp_path

        def _info(self):
            text = tfds.features.Text()
            features = {"q": text, "c": tfds.features.Sequence({"text": text}), "n": tfds.features.Scalar(np.int64)}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(8), "test": self._generate_examples(3)}

        def _generate_examples(self, n):
            for i in range(n):
                yield i, {"q": f"q{i}", "c": [{"text": "x"}, {"text": "y"}], "n": i % 2}

    builder = Tiny(data_dir=tmp_path / "made", file_format=file_format)
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False, num_shards=2))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    used = []
    plain = tfds.core.DatasetBuilder.as_data_source
    monkeypatch.setattr(
        tfds.core.DatasetBuilder, "as_data_source", lambda *a, **k: (used.append(k["split"]), plain(*a, **k))[1]
    )
    fields = {"path": str(builder.data_dir), "question": "q", "choices": "c.text", "answer": "n"}
    train = data.load("tfds", "train", **fields)
    assert sorted((p.question, p.answer, p.choices) for p in train) == [
        (f"q{i}", "AB"[i % 2], ("x", "y")) for i in range(8)
    ]
    assert train == data.load("tfds", "train", **fields)
    assert data.load("tfds", "train", limit=3, **fields) == train[:3]
    assert [p.question for p in data.load("tfds", "train", train="train[:50%]", **fields)] == [
        p.question for p in train[:4]
    ]
    assert len(data.load("tfds", "test", **fields)) == 3
    assert used == ["train", "train", "train", "train[:50%]", "test"]


def test_what_is_not_prepared_is_not_looked_for_elsewhere(tmp_path, monkeypatch):
    paths = []
    exists = tfds.core.utils.gcs_utils.exists
    monkeypatch.setattr(tfds.core.utils.gcs_utils, "exists", lambda path: (paths.append(path), exists(path))[1])
    with pytest.raises(FileNotFoundError, match="gsm8k"):
        data.load("tfds", "train", name="gsm8k", data_dir=str(tmp_path))
    assert paths == []
