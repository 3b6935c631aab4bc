from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.artifact import ArtifactStore
from models.index.publish import publish
from models.index.search import beam_search
from models.index.storage import INDEX, load_index, load_model, save_index, save_model
from tests.models.index.small import small_ads, small_model, small_users


def test_a_loaded_model_and_index_answer_the_same(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    model, ads = small_model(), small_ads(40, generator)
    index = publish(model, ads)
    store = ArtifactStore(tmp_path)
    with store.create("retrieval_model", schema=model.schema, code_version="1") as draft:
        save_model(model, draft.path)
    with store.create("index", schema=model.schema, code_version="1") as index_draft:
        save_index(index, index_draft.path)
    assert draft.result is not None
    assert index_draft.result is not None
    folder = store.open("retrieval_model", draft.result.version, schema=model.schema).path
    again, index_again = load_model(folder), load_index(index_draft.result.path)
    assert again.config == model.config
    assert not again.training
    user = small_users(4, 40, generator)
    with torch.no_grad():
        before = beam_search(model, index, model.user_state(user, ads), beams=(2, 5), k=7)
        after = beam_search(again, index_again, again.user_state(user, ads), beams=(2, 5), k=7)
    assert torch.equal(before.ad_code_BK, after.ad_code_BK)
    assert torch.equal(before.score_BK, after.score_BK)


def test_what_is_missing_or_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no retrieval model"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="no index"):
        load_index(tmp_path)
    model = small_model()
    save_model(model, tmp_path)
    wider = replace(model.config, width=16).to_dict()
    (tmp_path / "retrieval.json").write_text(__import__("json").dumps(wider))
    with pytest.raises(ValueError, match="has shape"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["vector_SQd", "level.1.vector_KQd"])
def test_an_index_that_lacks_a_tensor_names_it(tmp_path: Path, name: str) -> None:
    model = small_model()
    save_index(publish(model, small_ads(40, torch.Generator().manual_seed(0))), tmp_path)
    tensors = load_file(tmp_path / INDEX)
    assert name in tensors, sorted(tensors)
    del tensors[name]
    save_file(tensors, tmp_path / INDEX)
    with pytest.raises(ValueError, match=rf"{INDEX}: tensor {name} is missing"):
        load_index(tmp_path)
