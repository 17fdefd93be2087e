"""What this package changes in transformers: two methods, and nothing for models without a method."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import config
from transformers import BertModel

import outeffhop
from outeffhop.models import hf_private

PRIVATE = ("_attn_implementation", "_orig_mod", "_model_mapping", "_from_config", "_can_set", "_forward_pre_hooks")


def test_two_methods_are_wrapped_and_no_other_is_changed():
    code = """
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
kinds = (PreTrainedConfig, PreTrainedModel, transformers.BertModel, transformers.BertConfig)
before = [dict(vars(kind)) for kind in kinds]
import outeffhop, outeffhop.models
changed = [{n for n in {*old, *vars(kind)} if old.get(n) is not vars(kind).get(n)} for old, kind in zip(before, kinds)]
print(changed == [set(), {"save_pretrained", "from_pretrained"}, set(), set()] or changed)
once = PreTrainedModel.save_pretrained
outeffhop.models.register()
print(PreTrainedModel.save_pretrained is once)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "True"]


def test_private_names_are_used_in_one_file():
    for path in Path(outeffhop.__file__).parent.joinpath("models").rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        found = [name for name in names if name.startswith(PRIVATE)]
        assert not found or path.name == "hf_private.py", f"{path}: {found}"


def test_the_hook_is_there_while_a_model_is_loaded_and_no_longer(tmp_path, monkeypatch):
    BertModel(config("bert")).save_pretrained(tmp_path / "bert")
    handles = []
    register = hf_private.register_module_module_registration_hook

    def registering(hook):
        handles.append(register(hook))
        return handles[-1]

    monkeypatch.setattr(hf_private, "register_module_module_registration_hook", registering)
    BertModel.from_pretrained(tmp_path / "bert")
    with pytest.raises(OSError, match="nothing"):
        BertModel.from_pretrained(tmp_path / "nothing", local_files_only=True)
    assert len(handles) == 2
    assert not any(handle.id in handle.hooks_dict_ref() for handle in handles)


def test_each_config_is_set_by_itself():
    settings = config("bert")
    hf_private.set_implementation(settings, "eager")
    assert hf_private.implementation(settings) == "eager"
    model = torch.nn.Linear(2, 2)
    compiled = torch.compile(model)
    with pytest.raises(TypeError, match="model is compiled"):
        hf_private.refuse_compiled(compiled)
    assert hf_private.inside(compiled) is model
    assert hf_private.inside(model) is None
