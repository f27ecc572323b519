"""ResNet-101 version 2 for 224x224 colour images: 33 pre-activation blocks, 44,675,560 parameters.

Layers: He, Zhang, Ren and Sun, "Identity Mappings in Deep Residual Networks", arXiv 1603.05027 (2016), in Keras's
form; parameters are counted as Keras does, at 1000 classes and with moving means and variances. Learning rate: 0.1
per 256 images, Goyal et al., arXiv 1706.02677 (2017); batch size and number of epochs are our own choice.
"""

from torch import nn

from paceline.train.models import _residual

INPUT = (3, 224, 224)
LEARNING_RATE = 0.00625
MOMENTUM = 0.9
BATCH_SIZE = 16
EPOCHS = 10


def build(num_classes: int) -> nn.Module:
    """Make the network: (n, 3, 224, 224) images to (n, num_classes) logits."""
    return _residual.network((3, 4, 23, 3), num_classes)
