"""Reading checkpoints: what is right is read as stored, what is wrong is named, and nothing else is touched."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open

from model import checkpoint, checkpoint_writer
from model.checkpoint import open_checkpoint, open_source
from model.checkpoint_writer import hub_config, write_checkpoint
from model.config import PRESETS, preset, tensor_shapes
from model.errors import CheckpointError, ConfigError, InputError
from model.random_weights import parse_random_source
from tests.broken import (
    BROKEN,
    FC1,
    INDEX,
    PROJECTOR_SHARD,
    TOWER_SHARD,
    WQKV,
    edit_json,
    good_checkpoint,
    read_shard,
    rewrite_shard,
    write_shard,
)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "make_checkpoint.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return good_checkpoint(tmp_path / "checkpoint")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, read by the safetensors library."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping
    return tensors


# ----------------------------------------------------------------------------------------------------- good checkpoints


@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_reads_what_the_safetensors_library_reads(tmp_path: Path, name: str, shards: int):
    source = parse_random_source(f"random:{name}")
    write_checkpoint(source, tmp_path / "c", shards=shards)
    opened = open_checkpoint(tmp_path / "c")
    expected = stored(tmp_path / "c")
    assert opened.config == PRESETS[name]
    assert opened.names() == tuple(tensor_shapes(PRESETS[name]))
    for key in opened.names():
        assert torch.equal(opened.tensor(key), expected[key])
        assert torch.equal(opened.tensor(key), source.tensor(key))
        assert opened.tensor(key).dtype == torch.bfloat16
        assert opened.dtype(key) == "bfloat16"
    # the language part is there, and was not taken
    assert sum(key.startswith("language_model.") for key in expected) >= 6


def test_kimi_vl_names(tmp_path: Path):
    small = {"hidden_size": 96, "intermediate_size": 132, "num_hidden_layers": 1, "num_attention_heads": 4}
    write_checkpoint(parse_random_source("random:kimi-vl?layers=1"), tmp_path / "c", shards=3)
    opened = open_checkpoint(tmp_path / "c")
    assert opened.config == preset("kimi-vl", layers=1)
    assert opened.tensor("multi_modal_projector.linear_2.weight").shape == (2048, 4608)
    # the same names under sizes that differ: found out by shape
    edit_json(tmp_path / "c" / "config.json", lambda document: document["vision_config"].update(small))
    with pytest.raises(CheckpointError, match=r"has shape \[1152, 3, 14, 14\].*\[96, 3, 14, 14\]"):
        open_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_float_dtypes(tmp_path: Path, dtype: str):
    source = parse_random_source("random:tiny")
    write_checkpoint(source, tmp_path / "c", shards=1, dtype=dtype)
    opened = open_checkpoint(tmp_path / "c")
    for key in opened.names():
        assert opened.dtype(key) == dtype
        assert torch.equal(opened.tensor(key), source.tensor(key).to(getattr(torch, dtype)))
    assert opened.sha256() != source.sha256()


def test_mixed_float_dtypes(folder: Path):
    before = stored(folder)[WQKV]

    def change(tensors):
        tensors[WQKV] = ("F32", tensors[WQKV][1], before.float().numpy().tobytes())

    rewrite_shard(folder / TOWER_SHARD, change)
    opened = open_checkpoint(folder)
    assert {opened.dtype(name) for name in opened.names()} == {"bfloat16", "float32"}
    assert torch.equal(opened.tensor(WQKV), before.float())
    assert opened.tensor(FC1).dtype == torch.bfloat16


def test_data_at_an_odd_offset(folder: Path):
    """The format asks for no alignment; older writers did not pad the header."""
    before = stored(folder)
    header, data = read_shard(folder / TOWER_SHARD)
    text = json.dumps(header).encode()
    write_shard(folder / TOWER_SHARD, text + b" " * (1 - len(text) % 2), data)
    assert (folder / TOWER_SHARD).read_bytes()[0] % 2 == 1
    opened = open_checkpoint(folder)
    for key in opened.names():
        assert torch.equal(opened.tensor(key), before[key])
        assert opened.tensor(key).data_ptr() % 2 == 0  # vector instructions may fault on odd addresses


def test_tensors_are_private(folder: Path):
    """Tensors may be changed by who asked for them, without reaching the file or the next reader."""
    opened = open_checkpoint(folder)
    content = (folder / TOWER_SHARD).read_bytes()
    tensor = opened.tensor(WQKV)
    before = tensor.clone()
    tensor.zero_()
    assert (folder / TOWER_SHARD).read_bytes() == content
    assert torch.equal(opened.tensor(WQKV), before)


def test_links_and_odd_path_names(tmp_path: Path):
    """The hub's cache holds links to blobs outside the folder; paths have spaces and other letters."""
    folder = good_checkpoint(tmp_path / "Größe 你好 x")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for file in [TOWER_SHARD, PROJECTOR_SHARD]:
        (folder / file).rename(blobs / file)
        (folder / file).symlink_to(Path("..") / "blobs" / file)
    assert open_checkpoint(folder).sha256() == parse_random_source("random:tiny").sha256()


# -------------------------------------------------------------------------------------------------- nothing else opened

_OPENED: list[str] | None = None


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _OPENED is not None and event == "open":
        _OPENED.append(str(arguments[0]))


sys.addaudithook(_audit)  # sees every open of the interpreter; cannot be removed, hence the switch


@pytest.mark.parametrize("others", ["garbage", "missing"])
def test_of_64_shards_two_are_opened(tmp_path: Path, others: str):
    global _OPENED  # noqa: PLW0603 - see above
    source = parse_random_source("random:tiny")
    folder = tmp_path / "c"
    write_checkpoint(source, folder, shards=64)
    vision = {f"model-000{i}-of-000064.safetensors" for i in (63, 64)}
    shards = {path.name for path in folder.glob("*.safetensors")}
    assert len(shards) == 64
    for name in shards - vision:
        (folder / name).write_bytes(b"garbage") if others == "garbage" else (folder / name).unlink()
    _OPENED = []
    try:
        opened = open_checkpoint(folder)
        opened.sha256()
        seen = {Path(name).name for name in _OPENED if name.startswith(str(folder))}
    finally:
        _OPENED = None
    assert seen == vision | {"config.json", INDEX}
    assert opened.sha256() == source.sha256()


def test_shards_are_found_by_name_not_by_file_name(folder: Path):
    """The file that the index names counts, wherever it stands and whatever it is called."""
    (folder / "parts").mkdir()
    (folder / TOWER_SHARD).rename(folder / "parts" / "a.bin")

    def edit(document):
        places = document["weight_map"]
        document["weight_map"] = {k: "parts/a.bin" if v == TOWER_SHARD else v for k, v in places.items()}

    edit_json(folder / INDEX, edit)
    assert open_checkpoint(folder).sha256() == parse_random_source("random:tiny").sha256()


def sparse_checkpoint(folder: Path, name: str) -> int:
    """A checkpoint of real size whose data are a hole in the file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hub_config(PRESETS[name])))
    header, position = {}, 0
    for key, shape in tensor_shapes(PRESETS[name]).items():
        size = 2 * int(np.prod(shape))
        header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    write_shard(folder / "model.safetensors", header, b"")
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size + position)
    return position


@pytest.mark.parametrize(("name", "tensors"), [("kimi-k2.5", 335), ("kimi-vl", 335), ("kimi-k3", 168)])
def test_a_real_size_is_opened_without_reading_its_data(tmp_path: Path, name: str, tensors: int):
    """Tensor counts as in the table of kimi-vision.md, although K2.5's quantisation list names no vision tensor."""
    size = sparse_checkpoint(tmp_path / "c", name)
    assert size > 890e6
    tracemalloc.start()
    try:
        opened = open_checkpoint(tmp_path / "c")
        shapes = tensor_shapes(PRESETS[name])
        largest = max(shapes, key=lambda key: int(np.prod(shapes[key])))
        tensor = opened.tensor(largest)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(opened.names()) == tensors
    assert tensor.shape == shapes[largest]
    assert peak < 8e6  # the header's JSON; the largest tensor alone has 42 MB or more


@pytest.mark.parametrize("name", ["header-giant", "shard-lfs-pointer", "shard-cut-in-header"])
def test_sizes_that_a_file_claims_cost_no_memory(folder: Path, name: str):
    BROKEN[name].apply(folder)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            open_checkpoint(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2e6  # config, index and one header of a tiny checkpoint


def test_torch_is_not_needed_to_open_and_hash(folder: Path):
    program = (
        "import sys; from model.checkpoint import open_source\n"
        "a = open_source(sys.argv[1]); b = open_source('random:tiny')\n"
        "assert a.sha256() == b.sha256(); assert 'torch' not in sys.modules; print(a.sha256())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert len(done.stdout.strip()) == 64


# ------------------------------------------------------------------------------------------------------------- the hash


def test_hash_is_that_of_the_documented_text(folder: Path):
    tensors = stored(folder)
    lines = ""
    for name, shape in tensor_shapes(PRESETS["tiny"]).items():
        raw = tensors[name].view(torch.int16).numpy().tobytes()
        lines += f"{name} bfloat16 {list(shape)} {hashlib.sha256(raw).hexdigest()}\n"
    assert open_checkpoint(folder).sha256() == hashlib.sha256(lines.encode()).hexdigest()


def test_hash_ignores_sharding_and_language_and_sees_one_bit(tmp_path: Path, folder: Path):
    source = parse_random_source("random:tiny")
    write_checkpoint(source, tmp_path / "one")
    first = open_checkpoint(folder).sha256()
    assert open_checkpoint(tmp_path / "one").sha256() == first
    language = folder / "model-00001-of-000003.safetensors"
    language.write_bytes(language.read_bytes()[:-1] + b"\x01")
    assert open_checkpoint(folder).sha256() == first
    for shard in (TOWER_SHARD, PROJECTOR_SHARD):
        content = bytearray((folder / shard).read_bytes())
        content[-1] ^= 1
        (folder / shard).write_bytes(content)
        changed = open_checkpoint(folder).sha256()
        assert changed != first
        first = changed


def test_hash_is_computed_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    opened = open_checkpoint(folder)
    first = opened.sha256()
    monkeypatch.setattr(checkpoint, "weights_sha256", None)
    assert opened.sha256() == first


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoint_is_named_in_one_line(folder: Path, name: str):
    BROKEN[name].apply(folder)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        open_source(str(folder))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 800
    assert message.startswith(str(folder))
    said = message.replace(str(folder), "")  # the path must not be what contains the words
    for word in BROKEN[name].words:
        assert word in said, said
    assert re.search(r"; \w+|expected|not supported|config\.json calls for|\.\.\.$", said), "does not say what to do"


def test_single_file_is_checked_alike(tmp_path: Path):
    folder = tmp_path / "c"
    write_checkpoint(parse_random_source("random:tiny"), folder)
    path = folder / "model.safetensors"
    good = path.read_bytes()
    rewrite_shard(path, lambda tensors: tensors.pop(WQKV) and None)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: vision tensors are missing: '{WQKV}'"):
        open_checkpoint(folder)
    path.write_bytes(good)
    rewrite_shard(path, lambda tensors: tensors.update({"vision_tower.x": ("F32", [1], bytes(4))}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: unknown vision tensors: 'vision_tower\.x'"):
        open_checkpoint(folder)
    path.write_bytes(good)

    def rename(tensors):
        for key in [key for key in tensors if key.startswith("vision_tower.")]:
            tensors[f"model.{key}"] = tensors.pop(key)
        for key in [key for key in tensors if key.startswith("mm_projector.")]:
            tensors[f"model.{key}"] = tensors.pop(key)

    rewrite_shard(path, rename)
    with pytest.raises(CheckpointError, match="as transformers saves them"):
        open_checkpoint(folder)
    path.write_bytes(good[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(folder)


def test_a_pipe_is_refused_and_not_waited_for(folder: Path):
    (folder / TOWER_SHARD).unlink()
    os.mkfifo(folder / TOWER_SHARD)
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(folder)


def test_a_file_that_shrinks_after_it_was_opened(folder: Path):
    opened = open_checkpoint(folder)
    (folder / TOWER_SHARD).write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"{TOWER_SHARD}: {re.escape(WQKV)} can no longer be read"):
        opened.tensor(WQKV)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("moonshotai/Kimi-K2.5", "looks like a hub id"),
        ("no-such-folder", "no such folder; SOURCE is a checkpoint folder in hub layout or random:PRESET"),
        ("/no/such/folder", "no such folder; SOURCE is"),
        ("x" * 5000, "no such folder; SOURCE is"),
        (str(SCRIPT), "not a folder; SOURCE is"),
    ],
)
def test_source_that_is_no_folder(text: str, words: str):
    with pytest.raises(CheckpointError, match=re.escape(words)):
        open_source(text)


def test_source_random_and_folder(folder: Path):
    drawn, read = open_source("random:tiny?seed=0"), open_source(str(folder))
    assert drawn.sha256() == read.sha256()
    assert (drawn.source, read.source) == ("random:tiny?seed=0", str(folder))


def test_norm_eps_reaches_the_config(tmp_path: Path):
    write_checkpoint(parse_random_source("random:tiny-k3"), tmp_path / "c")
    assert open_source(str(tmp_path / "c")).config.norm_eps == 2.0**-23
    assert open_source(str(tmp_path / "c"), norm_eps=2.0**-7).config.norm_eps == 2.0**-7
    assert open_source("random:tiny-k3", norm_eps=2.0**-7).config.norm_eps == 2.0**-7
    with pytest.raises(ConfigError, match="norm_eps"):
        open_source("random:tiny-k3", norm_eps=0.0)


# ---------------------------------------------------------------------------------------------------------- the writer


@pytest.mark.parametrize("name", PRESETS)
def test_written_config_has_the_hubs_spelling(name: str):
    document = hub_config(PRESETS[name])
    vision = document["vision_config"]
    if PRESETS[name].family == "kimi_vl":
        assert vision["model_type"] == "moonvit"
        assert not [field for field in vision if field.startswith(("vt_", "mm_"))]
        assert "quantization_config" not in document["text_config"]
        return
    assert {"vt_hidden_size", "vt_num_hidden_layers", "init_pos_emb_time", "mm_hidden_size"} <= set(vision)
    assert "hidden_size" not in vision
    ignore = document["text_config"]["quantization_config"]["ignore"]
    if PRESETS[name].family == "kimi_k25":
        assert vision["model_type"] == ""
        assert not [entry for entry in ignore if "vision" in entry or "projector" in entry]
        assert "qkv_hidden_size" not in vision
    else:
        assert "model_type" not in vision
        assert vision["qkv_hidden_size"] == PRESETS[name].qkv_hidden_size


def test_shard_names_and_total_size(folder: Path):
    index = json.loads((folder / INDEX).read_text())
    places = index["weight_map"]
    assert {places[name] for name in places if name.startswith("vision_tower.")} == {TOWER_SHARD}
    assert {places[name] for name in places if name.startswith("mm_projector.")} == {PROJECTOR_SHARD}
    data = [len(read_shard(path)[1]) for path in folder.glob("*.safetensors")]
    assert index["metadata"]["total_size"] == sum(data)


def test_writer_leaves_nothing_behind_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "_write_safetensors", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        good_checkpoint(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_writer_replaces_no_folder(folder: Path):
    before = (folder / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match="exists already"):
        good_checkpoint(folder)
    assert (folder / "config.json").read_bytes() == before


def test_writer_refuses_other_arguments(tmp_path: Path):
    source = parse_random_source("random:tiny")
    with pytest.raises(ValueError, match="shards is 0"):
        write_checkpoint(source, tmp_path / "c", shards=0)
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        write_checkpoint(source, tmp_path / "c", dtype="int8")


def test_script_from_another_folder(tmp_path: Path):
    command = [sys.executable, str(SCRIPT), "out", "--preset", "tiny-k3", "--seed", "5", "--layers", "3"]
    command += ["--shards", "4", "--dtype", "fp32", "--outliers"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    opened = open_checkpoint(tmp_path / "out")
    source = parse_random_source("random:tiny-k3?seed=5&layers=3&outliers=1")
    assert opened.config == source.config
    bf16 = opened.raw(WQKV).view(np.float32).astype(ml_dtypes.bfloat16)
    assert bf16.tobytes() == source.raw(WQKV).tobytes()
    assert len(list((tmp_path / "out").glob("model-*-of-000004.safetensors"))) == 4
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 3
    assert again.stderr.startswith("make_checkpoint: out: exists already")
    assert again.stderr.count("\n") == 1


@pytest.mark.slow
def test_transformers_loads_the_written_checkpoint(tmp_path: Path):
    """transformers' own loader finds every vision tensor of a K2.5 folder, and the values that we drew."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    folder = good_checkpoint(tmp_path / "c")
    sizes = {"hidden_size": 96, "intermediate_size": 132, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"model_type": "deepseek_v3", "hidden_size": 56, "num_hidden_layers": 1, "vocab_size": 64}
    text |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    text |= {"intermediate_size": 64, "moe_intermediate_size": 64, "n_routed_experts": 4, "num_attention_heads": 4}
    config = transformers.Kimi_K25Config(
        # its class reads only its own names (kimi-vision.md, section 1.3)
        vision_config={**sizes, "pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 4},
        text_config=text,
        projection_hidden_size=96,
        image_token_id=60,
        video_token_id=61,
    )
    model, info = transformers.Kimi_K25ForConditionalGeneration.from_pretrained(
        folder, config=config, output_loading_info=True, dtype=torch.bfloat16
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not [name for name in info[key] if "vision" in str(name) or "projector" in str(name)], key
    v_rows = parse_random_source("random:tiny").tensor(WQKV)[192:]
    assert torch.equal(model.model.vision_tower.layers[0].attn.v_proj.weight, v_rows)
    fc1 = parse_random_source("random:tiny").tensor(FC1)
    assert torch.equal(model.model.vision_tower.layers[1].mlp.fc2.weight, fc1)


def test_every_error_is_an_input_error():
    assert issubclass(CheckpointError, InputError)
    assert issubclass(ConfigError, InputError)
