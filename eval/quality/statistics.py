"""The statistics behind the image metrics: functions of features, which know no network and no file.

They run in float64 on the CPU, for the square root of a covariance and nearest neighbours lose what float32 has.
Letters: N real images, M generated images, D features, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.errors import UserError

# Real or generated images compared with all others at once: 1024 x 30000 distances take 246 MB.
ROWS_PER_PASS = 1024


def frechet_distance(real: Tensor, generated: Tensor) -> float:
    """Distance of the normal distributions fitted to two sets of features, [N,D] and [M,D] (Heusel et al. 2017, eq. 6).
    Raises `UserError` for a set of one image: it has no covariance.
    """
    for name, features in (("real", real), ("generated", generated)):
        if len(features) < 2:
            raise UserError(f"FID needs two {name} images at least, found {len(features)}", hint="give more images")
    real, generated = real.double(), generated.double()
    return gaussian_distance(real.mean(0), torch.cov(real.T), generated.mean(0), torch.cov(generated.T))


def gaussian_distance(mean_a: Tensor, cov_a: Tensor, mean_b: Tensor, cov_b: Tensor) -> float:
    """|mean_a - mean_b|^2 + Tr(A + B - 2 (A B)^(1/2)), float64 means [D] and covariances [D,D]. A B is not symmetric,
    but A^(1/2) B A^(1/2) has the same eigenvalues and is: no complex square root, and singular covariances need no
    padding.
    """
    values, vectors = torch.linalg.eigh(cov_a)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    product = root @ cov_b @ root
    overlap = torch.linalg.eigvalsh((product + product.T) / 2).clamp_min(0).sqrt().sum()
    distance = (mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * overlap
    return max(float(distance), 0.0)


def precision_recall(real: Tensor, generated: Tensor, *, neighbours: int = 3) -> tuple[float, float]:
    """Shares of generated images among the real ones, and the reverse (Kynkaanniemi et al. 2019, eq. 1 and 2). An image
    is among a set where it lies within the distance of some member to its `neighbours`-th nearest in that set. Raises
    `UserError` where a set, [N,D] or [M,D], is too small to have that neighbour.
    """
    for name, features in (("real", real), ("generated", generated)):
        if len(features) <= neighbours:
            problem = f"precision and recall need more than {neighbours} {name} images, found {len(features)}"
            raise UserError(problem, hint="give more images")
    real, generated = real.double(), generated.double()
    return _share_inside(generated, real, neighbours), _share_inside(real, generated, neighbours)


def named(real: Tensor, captions: Sequence[str], generated: Tensor, wanted: Sequence[str]) -> tuple[Tensor, float]:
    """Which of the generated pictures have a real one of their own name as nearest, [M] float; and the share of
    real ones of which that is true: no generator should be expected to do better.

    What a caption says behind its comma is a manner ("a red apple, flat"). Where there are several, a picture is looked
    for among those of other manners: what is alike there is the thing, and a copy of a trained picture gains nothing.

    Args:
        real: [N,D]. Features are compared by their cosine, with mean and deviation of the real ones taken off.
        generated: [M,D].
    """
    mean, std = real.mean(0), real.std(0) + 1e-3
    normed = F.normalize((real - mean) / std, dim=-1)
    parts = [caption.partition(", ")[::2] for caption in captions]
    is_one = len({manner for _, manner in parts}) == 1

    def hits(features: Tensor, of: Sequence[str]) -> Tensor:
        result = []
        for scores, caption in zip(features @ normed.T, of, strict=True):
            name, _, manner = caption.partition(", ")
            seen = torch.tensor([is_one or other != manner for _, other in parts])
            result.append(parts[int(scores.masked_fill(~seen, -2.0).argmax())][0] == name)
        return torch.tensor(result).float()

    others = hits(normed, captions).mean()
    return hits(F.normalize((generated - mean) / std, dim=-1), wanted), float(others)


def inception_score(logits: Tensor, *, splits: int = 10) -> tuple[float, float]:
    """Mean and standard deviation, over consecutive parts, of exp of the mean divergence between p(class | image) and
    p(class) (Salimans et al. 2016, section 4). `logits` [M,K] are up to a constant per image.
    """
    count = len(logits)
    if count < splits:
        raise UserError(
            f"the inception score is a mean over {splits} parts, and there are {count} images", hint="give more images"
        )
    scores = []
    for part in range(splits):
        log_p = F.log_softmax(logits[part * count // splits : (part + 1) * count // splits].double(), dim=-1)
        p = log_p.exp()
        # A class of probability zero has the limit 0 log 0 = 0, in both terms.
        divergence = torch.xlogy(p, p).sum(-1) - torch.xlogy(p, p.mean(0)).sum(-1)
        scores.append(divergence.mean().exp())
    values = torch.stack(scores)
    return float(values.mean()), float(values.std(correction=0))


def cosines(images: Tensor, texts: Tensor) -> Tensor:
    """Cosine of each image's embedding with its own text's, [M,D] and [M,D] to [M] in [-1, 1]."""
    assert images.shape == texts.shape, (images.shape, texts.shape)
    return F.cosine_similarity(images.double(), texts.double(), dim=-1)


def mean_and_error(values: Tensor) -> tuple[float, float | None]:
    """Mean of [M] values and its standard error, which a single value does not have."""
    error = float(values.std()) / len(values) ** 0.5 if len(values) > 1 else None
    return float(values.mean()), error


def _share_inside(probes: Tensor, members: Tensor, neighbours: int) -> float:
    """Share of probes that lie in the ball of some member."""
    # The nearest of all is the member itself.
    radii = torch.cat(
        [torch.cdist(rows, members).kthvalue(neighbours + 1).values for rows in members.split(ROWS_PER_PASS)]
    )
    inside = [(torch.cdist(rows, members) <= radii).any(-1) for rows in probes.split(ROWS_PER_PASS)]
    return float(torch.cat(inside).double().mean())
