"""Image quality: statistics against closed forms and brute force, networks against their own libraries, errors."""

import string
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from draftsmith.core.errors import UserError
from draftsmith.eval.quality import statistics
from draftsmith.eval.quality.clip import aesthetic_scores, clip_pair, hps_pair
from draftsmith.eval.quality.convolutional import Vgg16, class_logits, fid_features, load_inception, vgg_features
from draftsmith.eval.quality.extractors import (
    Extractor,
    Folder,
    as_is,
    clean_resize,
    crop_bicubic,
    crop_lanczos,
    extract,
    pad_bicubic,
    squash_bilinear,
)
from draftsmith.eval.quality.measure import QualityConfig, check, measure
from draftsmith.eval.quality.metric_weights import NEEDS, SOURCES, load_state
from fails import fails_with
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

SIDE = 16
# The PIL backend: the other one needs torchvision.
CLIPImageProcessor = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
WORDS = ("a", "photo", "depicts", "red", "blue", "cube")
CAPTIONS = ["a red cube", "a blue cube", "cube", "a photo"]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def pictures(rng, n=4, height=24, width=24):
    return [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(n)]


def random_covariance(dimensions, seed):
    root = torch.randn(dimensions, dimensions, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return root @ root.T / dimensions


# Statistics


def test_gaussian_distance_of_independent_features_has_a_closed_form():
    a, b = torch.tensor([1.0, 4.0, 0.0]).double(), torch.tensor([9.0, 1.0, 2.0]).double()
    mean = torch.tensor([1.0, 2.0, 2.0]).double()
    expected = 9 + (a.sqrt() - b.sqrt()).square().sum()  # |mean|^2, and each deviation on its own
    actual = statistics.gaussian_distance(mean, a.diag(), torch.zeros(3).double(), b.diag())
    assert actual == pytest.approx(float(expected), abs=1e-12)


def test_gaussian_distance_equals_the_eigenvalues_of_the_plain_product():
    a, b = random_covariance(12, 0), random_covariance(12, 1)
    zero = torch.zeros(12, dtype=torch.float64)
    root = torch.linalg.eigvals(a @ b).sqrt().real.sum()
    expected = float(a.trace() + b.trace() - 2 * root)
    assert statistics.gaussian_distance(zero, a, zero, b) == pytest.approx(expected, rel=1e-10)
    assert statistics.gaussian_distance(zero, b, zero, a) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("n", [400, 6])  # 6 images for 32 features: singular covariances
def test_frechet_distance_of_a_set_to_itself_is_0_and_to_its_shift_the_shift(n):
    features = torch.randn(n, 32, generator=torch.Generator().manual_seed(0))
    assert statistics.frechet_distance(features, features) == pytest.approx(0, abs=1e-6)
    assert statistics.frechet_distance(features, features + 2) == pytest.approx(4 * 32, abs=1e-4)


def test_precision_and_recall_equal_the_obvious_loops(rng, monkeypatch):
    monkeypatch.setattr(statistics, "ROWS_PER_PASS", 7)
    real, generated = rng.normal(size=(30, 3)), rng.normal(0.8, 0.6, size=(25, 3))

    def share(probes, members):
        radii = [np.sort(np.linalg.norm(members - m, axis=1))[3] for m in members]
        inside = [any(np.linalg.norm(p - m) <= r for m, r in zip(members, radii, strict=True)) for p in probes]
        return np.mean(inside)

    expected = share(generated, real), share(real, generated)
    actual = statistics.precision_recall(torch.from_numpy(real), torch.from_numpy(generated))
    assert actual == pytest.approx(expected)
    assert 0 < expected[1] < expected[0]  # narrow and inside: precise, and little of the real set is covered


def test_inception_score_counts_classes_where_each_is_certain_and_is_1_where_none_is():
    certain = torch.eye(8).repeat(10, 1).log()  # -inf logits: classes of probability 0
    assert statistics.inception_score(certain) == pytest.approx((8, 0), abs=1e-12)
    assert statistics.inception_score(torch.ones(80, 8)) == pytest.approx((1, 0), abs=1e-12)


def test_inception_score_equals_the_obvious_sum(rng):
    logits = rng.normal(size=(23, 6))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    parts = [p[i * 23 // 4 : (i + 1) * 23 // 4] for i in range(4)]
    scores = [np.exp((q * (np.log(q) - np.log(q.mean(0)))).sum(1).mean()) for q in parts]
    expected = np.mean(scores), np.std(scores)
    assert statistics.inception_score(torch.from_numpy(logits) + 3, splits=4) == pytest.approx(expected)


@pytest.mark.parametrize(("call", "message"), [
    (lambda x: statistics.frechet_distance(x[:1], x), "two real images at least, found 1"),
    (lambda x: statistics.precision_recall(x, x[:3]), "more than 3 generated images, found 3"),
    (lambda x: statistics.inception_score(x), "mean over 10 parts, and there are 5 images"),
])  # fmt: skip
def test_too_few_images_are_refused(call, message):
    fails_with(message, call, torch.randn(5, 2))


# Pictures


def test_squares_are_cut_from_the_middle():
    picture = np.zeros((8, 14, 3), dtype=np.uint8)
    picture[:, 3:11] = 255
    for rule in (crop_lanczos, crop_bicubic):
        assert (rule(picture, 8) == 255).all(), rule
        assert rule(picture, 5).shape == (5, 5, 3)
    assert squash_bilinear(picture, 8).min() == 0
    padded = pad_bicubic(picture, 14)
    assert (padded[3:11] == picture).all() and not padded[:3].any() and not padded[11:].any()


@pytest.mark.parametrize("side", [40, 10])
def test_clean_resize_neither_rounds_nor_clips(rng, side):
    images = torch.from_numpy(np.stack(pictures(rng, 2))).permute(0, 3, 1, 2)
    resized = clean_resize(images, side)
    expected = F.interpolate(images.float(), (side, side), mode="bicubic", antialias=True)
    torch.testing.assert_close(resized, expected, atol=1e-3, rtol=0)
    assert (resized != resized.round()).any()
    if side == 40:
        assert resized.min() < 0 and resized.max() > 255


def test_folder_reads_pictures_in_the_order_of_their_names(tmp_path, rng):
    images = pictures(rng, 3)
    for name, image in zip(["b.png", "a.png", "c/d.png"], images, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture")
    folder = Folder(tmp_path)
    assert len(folder) == 3
    for actual, expected in zip(folder, [images[1], images[0], images[2]], strict=True):
        assert (actual == expected).all()
    fails_with("no pictures", Folder, tmp_path / "nowhere")


# CLIP, HPS v2.1 and the aesthetic score


def make_tokenizer():
    letters = list(string.ascii_lowercase)
    vocab, merges = letters + [f"{letter}</w>" for letter in letters], []
    for word in WORDS:
        pieces = [*word[:-1], f"{word[-1]}</w>"]
        starts = ["".join(pieces[:i]) for i in range(1, len(pieces) + 1)]
        merges += [(first, piece) for (first, _), piece in zip(pairwise(starts), pieces[1:], strict=True)]
        vocab += starts[1:]
    vocab = [*dict.fromkeys(vocab), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer({token: i for i, token in enumerate(vocab)}, list(dict.fromkeys(merges)))


def tiny_clip_config(tokenizer, activation="quick_gelu"):
    shape = {"intermediate_size": 64, "num_hidden_layers": 2, "hidden_act": activation, "projection_dim": 8}
    text = {"vocab_size": len(tokenizer), "hidden_size": 24, "num_attention_heads": 2, "max_position_embeddings": 12}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    vision = {"hidden_size": 32, "num_attention_heads": 4, "image_size": SIDE, "patch_size": 8}
    return {"projection_dim": 8, "text_config": shape | text | ends, "vision_config": shape | vision}


@pytest.fixture
def clip_folder(tmp_path):
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(**tiny_clip_config(tokenizer)))
    for parameter in model.parameters():  # random towers say little: louder weights tell inputs apart
        parameter.data += 0.1 * torch.randn_like(parameter)
    folder = tmp_path / "tiny-clip"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_clip_score_is_the_mean_cosine_of_the_prefixed_captions(clip_folder, rng):
    images = pictures(rng, 4, height=300, width=280)
    config = QualityConfig(metrics=("clip",), weights={"clip": str(clip_folder)}, batch_size=3)
    result = measure(config, images, captions=CAPTIONS)["clip"]

    model, tokenizer = CLIPModel.from_pretrained(clip_folder).eval(), CLIPTokenizer.from_pretrained(clip_folder)
    processor = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    cropped = [Image.fromarray(crop_lanczos(image, 256)) for image in images]
    cosines = []
    with torch.no_grad():
        for image, caption in zip(cropped, CAPTIONS, strict=True):
            pixels = processor(images=image, return_tensors="pt")["pixel_values"]
            outputs = model(pixel_values=pixels, **tokenizer("A photo depicts " + caption, return_tensors="pt"))
            cosines.append(F.cosine_similarity(outputs.image_embeds, outputs.text_embeds).item())
    assert result.value == pytest.approx(np.mean(cosines), abs=1e-6)
    assert result.spread == pytest.approx(np.std(cosines, ddof=1) / 2, abs=1e-6)
    assert np.ptp(cosines) > 0.01 and result.n == 4
    assert result.what == "CLIP score (tiny-clip, mean cosine with 'A photo depicts ...')"


def test_long_captions_are_cut_and_keep_their_end(clip_folder):
    pair = clip_pair(clip_folder, "cpu")
    tokens = make_tokenizer()(["a red " * 20], truncation=True, max_length=12)["input_ids"][0]
    assert len(tokens) == 12 and tokens[-1] == make_tokenizer().eos_token_id
    long, longer = pair.texts(["a red " * 20, "a red " * 30])
    assert torch.equal(long, longer)


class OpenClipBlock(nn.Module):
    """A layer as open_clip builds it, on torch's own attention."""

    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 64), "c_proj": nn.Linear(64, width)})

    def forward(self, x, mask=None):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class OpenClip(nn.Module):
    """open_clip's CLIP in its names and its order, written apart from ours; random and loud."""

    def __init__(self, vocab, positions):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(4.6))
        self.token_embedding, self.ln_final = nn.Embedding(vocab, 24), nn.LayerNorm(24)
        self.positional_embedding = nn.Parameter(torch.randn(positions, 24))
        self.text_projection = nn.Parameter(torch.randn(24, 8))
        self.transformer = nn.ModuleDict({"resblocks": nn.ModuleList(OpenClipBlock(24, 2) for _ in range(2))})
        self.visual = visual = nn.Module()
        visual.class_embedding = nn.Parameter(torch.randn(32))
        visual.positional_embedding = nn.Parameter(torch.randn((SIDE // 8) ** 2 + 1, 32))
        visual.proj = nn.Parameter(torch.randn(32, 8))
        visual.conv1 = nn.Conv2d(3, 32, 8, stride=8, bias=False)
        visual.ln_pre, visual.ln_post = nn.LayerNorm(32), nn.LayerNorm(32)
        visual.transformer = nn.ModuleDict({"resblocks": nn.ModuleList(OpenClipBlock(32, 4) for _ in range(2))})
        for parameter in self.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)

    def encode_image(self, pixels):
        visual = self.visual
        x = visual.conv1(pixels).flatten(2).mT
        x = torch.cat([visual.class_embedding.expand(len(x), 1, -1), x], 1) + visual.positional_embedding
        x = visual.ln_pre(x)
        for block in visual.transformer["resblocks"]:
            x = block(x)
        return F.normalize(visual.ln_post(x[:, 0]) @ visual.proj, dim=-1)

    def encode_text(self, ids):
        x = self.token_embedding(ids) + self.positional_embedding[: ids.shape[1]]
        mask = torch.full((ids.shape[1], ids.shape[1]), -torch.inf).triu(1)
        for block in self.transformer["resblocks"]:
            x = block(x, mask)
        ends = ids.argmax(-1)  # the end of the text has the largest id
        return F.normalize(self.ln_final(x)[torch.arange(len(ids)), ends] @ self.text_projection, dim=-1)


def test_hps_reads_a_state_of_open_clip(clip_folder, tmp_path, rng):
    torch.manual_seed(1)
    tokenizer = make_tokenizer()
    reference = OpenClip(len(tokenizer), positions=12).eval()
    path = tmp_path / "HPS_v2.1_compressed.pt"
    torch.save({"epoch": 1, "state_dict": reference.state_dict()}, path)
    pair = hps_pair(path, clip_folder, "cpu", tiny_clip_config(tokenizer, "gelu"))

    image = pictures(rng, 1, SIDE, SIDE)[0]
    batch = torch.from_numpy(image).permute(2, 0, 1)[None]
    processor = CLIPImageProcessor(do_resize=False, do_center_crop=False)
    with torch.no_grad():
        expected = reference.encode_image(processor(images=image, return_tensors="pt")["pixel_values"])
        torch.testing.assert_close(pair.features(batch), expected, atol=1e-5, rtol=0)
        ids = [tokenizer(caption)["input_ids"] for caption in CAPTIONS]
        expected = torch.cat([reference.encode_text(torch.tensor([row])) for row in ids])
        torch.testing.assert_close(pair.texts(CAPTIONS), expected, atol=1e-5, rtol=0)

    config = QualityConfig(metrics=("hpsv2",))
    actual = measure(config, [image] * 4, captions=CAPTIONS, extractors={"hpsv2": pair})["hpsv2"]
    assert actual.value == pytest.approx((pair.features(batch) @ pair.texts(CAPTIONS).T).mean().item(), abs=1e-6)
    assert actual.what.startswith("HPS v2 (HPS_v2.1_compressed, mean cosine")


@pytest.mark.parametrize("deep", [False, True])
def test_the_aesthetic_score_is_linear_in_the_unit_embedding(clip_folder, tmp_path, rng, deep):
    torch.manual_seed(2)
    if deep:
        widths = (8, 6, 5, 4, 3, 1)
        layers = [nn.Linear(*pair) for pair in pairwise(widths)]
        numbered = zip((0, 2, 4, 6, 7), layers, strict=True)
        state = {f"layers.{n}.{k}": v for n, layer in numbered for k, v in layer.state_dict().items()}
    else:
        layers = [nn.Linear(8, 1)]
        state = layers[0].state_dict()
    torch.save(state, tmp_path / "head.pth")
    save_file(state, tmp_path / "head.safetensors")
    images = pictures(rng, 3, SIDE, SIDE)
    batch = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    with torch.no_grad():
        expected = nn.Sequential(*layers)(clip_pair(clip_folder, "cpu").features(batch)).mean().item()
    for name in ("head.pth", "head.safetensors"):
        weights = {"aesthetic": str(tmp_path / name), "clip_large": str(clip_folder)}
        actual = measure(QualityConfig(metrics=("aesthetic",), weights=weights), images)["aesthetic"]
        assert actual.value == pytest.approx(expected, abs=1e-6)
        assert actual.what == "aesthetic score (head on tiny-clip)"


# Inception and VGG16


class Inception(nn.Module):
    """The published TorchScript's interface on a tiny network."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 5, 7, stride=16), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.output = nn.Linear(5, 11)

    def forward(self, images: torch.Tensor, return_features: bool = False, no_output_bias: bool = False):
        x = self.layers((images.float() - 128) / 128).flatten(1)
        if return_features:
            return x
        logits = F.linear(x, self.output.weight) if no_output_bias else self.output(x)
        return logits.softmax(-1)


def test_inception_gives_features_of_clean_pictures_and_logits_without_bias(tmp_path, rng):
    torch.manual_seed(3)
    network = Inception().eval()
    torch.jit.script(network).save(tmp_path / "inception.pt")
    loaded = load_inception(tmp_path / "inception.pt", "cpu")
    images = pictures(rng, 3, 300, 400)
    crops = torch.from_numpy(np.stack([crop_lanczos(p, 256) for p in images])).permute(0, 3, 1, 2)
    run = partial(extract, pictures=images, batch_size=2, device="cpu")
    with torch.no_grad():
        expected = network.layers((clean_resize(crops, 299) - 128) / 128).flatten(1)
        torch.testing.assert_close(run(fid_features(loaded)), expected)
        expected = network(crops, no_output_bias=True)
        torch.testing.assert_close(run(class_logits(loaded)).softmax(-1), expected)

    weights = {"inception": str(tmp_path / "inception.pt")}
    config = QualityConfig(metrics=("fid", "inception_score"), weights=weights)
    results = measure(config, images * 4, reference=images * 5)
    assert results["fid"].value < 1 and results["fid"].n == 12
    assert "against 15 real images" in results["fid"].what and "Inception v3 of 2015" in results["fid"].what
    assert 1 <= results["inception_score"].value <= 11

    network.output.weight.data[0, 0] = torch.nan
    torch.jit.script(network).save(tmp_path / "inception.pt")
    with pytest.raises(UserError, match=r"weight output.weight holds NaN or infinity[\s\S]*inception.pt"):
        load_inception(tmp_path / "inception.pt", "cpu")


def test_vgg16_has_torchvisions_names_and_shapes():
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Vgg16().named_parameters()}
    convolutions = [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28]
    names = [f"features.{n}" for n in convolutions] + ["classifier.0", "classifier.3"]
    assert list(shapes) == [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]
    assert shapes["features.28.weight"] == (512, 512, 3, 3)
    assert shapes["classifier.0.weight"] == (4096, 25088)
    assert (
        sum(np.prod(shape) for shape in shapes.values()) == 138_357_544 - 4096 * 1000 - 1000
    )  # without the last layer


def test_vgg16_gives_the_second_hidden_layer_before_its_relu(tmp_path, rng):
    torch.manual_seed(4)
    shape = {"widths": (2, 3, 4, 5, 6), "hidden": 7, "side": 64}
    network = Vgg16(**shape).eval()
    for weights in (p for p in network.parameters() if p.ndim > 1):
        torch.nn.init.kaiming_normal_(weights)  # torch's own start lets nothing of the pixels through 13 layers
    last = {"classifier.6.weight": torch.zeros(10, 7), "classifier.6.bias": torch.zeros(10)}
    torch.save(network.state_dict() | last, tmp_path / "vgg16.pth")
    extractor = vgg_features(tmp_path / "vgg16.pth", "cpu", Vgg16(**shape))
    images = pictures(rng, 2, 40, 90)
    squashed = np.stack([squash_bilinear(p, 64) for p in images])
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    pixels = torch.from_numpy((squashed / 255 - mean) / std).float().permute(0, 3, 1, 2)
    with torch.no_grad():
        hidden = network.classifier[0](network.features(pixels).flatten(1)).relu()
        expected = network.classifier[3](hidden)
    actual = extract(extractor, images, batch_size=2, device="cpu")
    torch.testing.assert_close(actual, expected)
    assert (actual < 0).any() and (actual[0] - actual[1]).abs().max() > 0.01


# The entry


@pytest.mark.parametrize("metric", NEEDS)
def test_a_metric_without_weights_says_which_and_from_where(metric, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    for name in NEEDS[metric]:
        others = {other: str(there) for other in NEEDS[metric] if other != name}
        caught = fails_with("", check, QualityConfig(metrics=(metric,), weights=others))
        message = str(caught)
        assert f"the metric '{metric}' needs {' from '.join(SOURCES[name])}" in message
        assert f"weights.{name}" in message and f"set weights: {{{name}: <its path>}}" in message
        with pytest.raises(UserError, match=r"there is nothing at .*nowhere"):
            check(QualityConfig(metrics=(metric,), weights=others | {name: str(tmp_path / "nowhere")}))


def test_weights_of_another_kind_are_refused(clip_folder, tmp_path):
    page = tmp_path / "page.pt"
    page.write_text("<html>404</html>")
    fails_with(r"page.pt cannot be read as TorchScript[\s\S]*nvlabs", load_inception, page, "cpu")
    with pytest.raises(UserError, match=r"page.pt cannot be read as a file of weights[\s\S]*weights.vgg16"):
        vgg_features(page, "cpu", Vgg16((1, 1, 1, 1, 1), 2, 32))
    other = tmp_path / "other.pth"
    torch.save({"layers.0.weight": torch.zeros(4, 8), "layers.3.weight": torch.zeros(1, 4)}, other)
    fails_with("other layers than a linear predictor", aesthetic_scores, other, clip_folder, "cpu")
    torch.save({"weight": torch.zeros(1, 9), "bias": torch.zeros(1)}, other)
    fails_with("embeddings of 9 numbers, and CLIP gives 8", aesthetic_scores, other, clip_folder, "cpu")
    with pytest.raises(UserError, match=r"size mismatch for weight: .*\[1, 9\].*\[2, 9\]"):
        load_state(nn.Linear(9, 2, bias=False), {"weight": torch.zeros(1, 9)}, other, "hpsv2")


def test_a_folder_without_tokenizer_or_tower_is_refused(clip_folder, tmp_path):
    model = CLIPModel.from_pretrained(clip_folder)
    model.save_pretrained(tmp_path / "silent")
    fails_with("tokenizer", clip_pair, tmp_path / "silent", "cpu")
    state = {k: v for k, v in model.state_dict().items() if k != "visual_projection.weight"}
    model.save_pretrained(tmp_path / "blind", state_dict=state)
    fails_with(r"visual_projection.weight is missing[\s\S]*clip-vit-base-patch32", clip_pair, tmp_path / "blind", "cpu")


@pytest.mark.parametrize(("metric", "arguments", "message"), [
    ("fid", {}, "'fid' compares with real images, and there are none"),
    ("clip", {}, "needs a caption for each of 2 images, found none"),
    ("hpsv2", {"captions": ["a"]}, "needs a caption for each of 2 images, found 1"),
])  # fmt: skip
def test_missing_inputs_are_refused(metric, arguments, message, rng):
    extractors = {metric: Extractor("none", as_is, lambda images: images, lambda texts: torch.zeros(1))}
    fails_with(message, measure, QualityConfig(metrics=(metric,)), pictures(rng, 2), extractors=extractors, **arguments)
    fails_with("no generated images", measure, QualityConfig(metrics=(metric,)), [], extractors=extractors, **arguments)
