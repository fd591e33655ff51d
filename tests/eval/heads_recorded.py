"""What tests of recorded heads share: batches of given states, and what goes into a head's layer and comes out."""

import torch
from draftsmith.core.batch import IMAGE, TEXT, Batch
from draftsmith.core.states import TargetStates

OUTPUT, LOSS = 3e-4, 1e-4


def close(actual, expected, tolerance=OUTPUT):
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=0)


def relatively(actual, expected, tolerance=1e-3):
    assert (actual.double() - expected.double()).abs().max() <= tolerance * expected.abs().max()


def batch_of(ids, visual, loss_mask, feature, layers) -> tuple[Batch, TargetStates]:
    ids, visual, loss_mask = ids.view(1, -1), visual.view(1, -1), loss_mask.view(1, -1)
    length = ids.shape[1]
    positions, modality = torch.arange(length).view(1, 1, -1), torch.where(visual, IMAGE, TEXT).to(torch.int8)
    batch = Batch(ids, torch.ones_like(visual), loss_mask, modality, positions, None, ("r",), seeds=(0,))
    layers = {layer: states.view(1, length, -1) for layer, states in layers.items()}
    return batch, TargetStates(feature.view(1, length, -1), layers, positions)


class Recorder(torch.nn.Module):
    """Keeps what goes into a head's layer and what comes out of it."""

    def __init__(self, head):
        super().__init__()
        self.inputs, self.outputs = [], []
        head.layers[0].register_forward_hook(lambda _, inputs, output: self.keep(inputs[0], output))

    def keep(self, inputs, output):
        self.inputs.append(inputs.detach()[0])
        self.outputs.append(output.detach()[0])


def shifted_rows(given, target):
    """The embeddings that the published module was handed, as rows of a table and ids into it, and layer 0."""
    shifted = given["inputs_embeds_shifted"][0]
    # Input j reads token j + 1: the first place's embedding is never read.
    target.embedding = torch.cat([target.embedding, shifted])
    ids = torch.arange(len(shifted)) + len(target.embedding) - len(shifted)
    return torch.cat([ids[:1], ids]), torch.cat([shifted[:1], shifted])
