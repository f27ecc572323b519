"""Cut the embedded sample out of Fashion-MNIST: `make_sample.py FOLDER`, FOLDER holding the four .gz files.

Reads the idx files as distributed, keeps the first images of three classes in the order of the files, and
writes train.npz and test.npz into the package. The same input gives the same arrays; the compressed bytes
are the same too where zlib is.
"""

import gzip
import hashlib
import struct
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

SAMPLE = Path(__file__).resolve().parent.parent / "src" / "paceline" / "train" / "sample"
# Fashion-MNIST's labels of trouser, dress and bag; ascending, for their order is that of the sample's labels
CLASSES = (1, 3, 8)
PARTS = {"train": ("train", 2000), "test": ("t10k", 500)}


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read an idx file of bytes: two zero bytes, type 8, the rank, big-endian sizes, then the values."""
    data = gzip.decompress(path.read_bytes())
    zeros, kind, rank = struct.unpack_from(">HBB", data)
    if zeros != 0 or kind != 8:
        raise ValueError(f"{path} is not an idx file of bytes: it starts with {data[:4].hex()}, not 000008")
    shape = struct.unpack_from(f">{rank}I", data, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * rank).reshape(shape)


def cut(folder: Path, prefix: str, num_each: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Take the first `num_each` images of every class; they stay in file order, so the classes stay mixed."""
    images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
    kept = np.sort(np.concatenate([np.flatnonzero(labels == source)[:num_each] for source in CLASSES]))
    return images[kept], np.searchsorted(CLASSES, labels[kept]).astype(np.uint8)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: make_sample.py FOLDER (the folder with the four .gz files of Fashion-MNIST)")
    for part, (prefix, num_each) in PARTS.items():
        images, labels = cut(Path(sys.argv[1]), prefix, num_each)
        path = SAMPLE / f"{part}.npz"
        np.savez_compressed(path, images=images, labels=labels)
        print(hashlib.sha256(path.read_bytes()).hexdigest(), path.name, images.shape, path.stat().st_size)
        if part == "train":
            print(f"mean {images.mean() / 255:.6f}, standard deviation {images.std() / 255:.6f}, of 1")


if __name__ == "__main__":
    main()
