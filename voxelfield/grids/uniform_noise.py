"""Uniform noise that can be computed again from its seed, to the same bits on every device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Few enough for the temporaries to stay in the cache. On a CPU, torch also leaves so few to a single thread, which does
# not wait for others on a busy machine.
_CPU_CHUNK = 1 << 15
_DEVICE_CHUNK = 1 << 22
_WORD = 0xFFFFFFFF
# Constants of lowbias32, a bijection of 32-bit words with little bias (Chris Wellons, "Prospecting for Hash
# Functions", 2018).
_FACTORS = (0x7FEB352D, 0x846CA68B)


@dataclass(frozen=True)
class UniformNoise:
    """An endless sequence of numbers uniform in [-bound, bound), each computed from the seed and its own index.

    Integer arithmetic, one exact conversion and one multiplication make a number, so every device computes the same
    bits. Torch's own generators differ from device to device, and start from the beginning only.

    Attributes:
        seed: Which sequence; not negative and below 2^64.
        bound: The largest magnitude, finite and not negative.
    """

    seed: int
    bound: float

    def write(self, out: Tensor, start: int = 0) -> None:
        """Writes successive elements of the sequence.

        Args:
            out: (N,) where to, of any floating-point dtype and on any device; gets elements ``start`` to
                ``start + N - 1``, rounded from float32 if it is narrower.
            start: Index of the first element.
        """
        if self.bound == 0:
            out.zero_()  # the product below would have negative zeros
            return
        chunk = chunk_size(out.device)
        counter = torch.arange(min(chunk, len(out)), dtype=torch.int32, device=out.device)
        begin, end = start, start + len(out)
        while begin < end:
            # No chunk crosses a multiple of 2^31, so counting does not overflow.
            stop = min(begin + chunk, end, (begin | _WORD >> 1) + 1)
            words = counter[: stop - begin] + _signed(begin & _WORD)
            _mix_words_(words.bitwise_xor_(_signed(self._key(begin >> 32))))
            # The arithmetic shift leaves the upper 24 bits as a signed integer, which float32 represents exactly.
            values = words.bitwise_right_shift_(8).to(torch.float32).mul_(self.bound * 2**-23)
            out[begin - start : stop - start] = values
            begin = stop

    def fill(self, tensor: Tensor) -> None:
        """Sets a tensor of any shape to the first elements of the sequence, in row-major order."""
        if tensor.is_contiguous():
            self.write(tensor.view(-1))
        else:
            values = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            self.write(values.view(-1))
            tensor.copy_(values)

    def fills(self, tensor: Tensor) -> bool:
        """Tells whether a tensor equals what :meth:`fill` would set it to; waits for its device."""
        flat = tensor.reshape(-1)
        chunk = chunk_size(flat.device)
        expected = flat.new_empty(min(chunk, len(flat)))
        for start in range(0, len(flat), chunk):
            present = flat[start : start + chunk]
            self.write(expected[: len(present)], start)
            if not torch.equal(expected[: len(present)], present):
                return False
        return True

    def _key(self, block: int) -> int:
        """Returns the word that tells one run of 2^32 elements of one seed from all others."""
        return _mix(self.seed & _WORD ^ _mix(self.seed >> 32 ^ _mix(block)))


def chunk_size(device: torch.device) -> int:
    """Returns how many elements a pass over a large tensor should work on at a time, a power of two."""
    return _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK


def draw_seed(like: Tensor) -> int | None:
    """Draws a seed from torch's default generator on the CPU, whatever the device of the values to come.

    Args:
        like: The tensor that noise is for.

    Returns:
        The seed, or None, with nothing drawn, where a tensor has no values to write (on the meta device, under
        ``FakeTensorMode``) or holds only a part of them (a sharded one).
    """
    if like.is_meta or type(like) not in (Tensor, torch.nn.Parameter):
        return None
    seed = torch.randint(2**63 - 1, (), device="cpu")
    return int(seed) if type(seed) is Tensor else None


def _mix_words_(words: Tensor) -> None:
    """Applies lowbias32 to words held as int32, whose products wrap around."""
    for shift, factor in zip((16, 15), _FACTORS, strict=True):
        words.bitwise_xor_(_shifted(words, shift)).mul_(_signed(factor))
    words.bitwise_xor_(_shifted(words, 16))


def _shifted(words: Tensor, shift: int) -> Tensor:
    """Shifts words to the right, with zeros from the left, where torch copies the sign."""
    return (words >> shift).bitwise_and_(_WORD >> shift)


def _mix(word: int) -> int:
    """Applies lowbias32 to one word."""
    for shift, factor in zip((16, 15), _FACTORS, strict=True):
        word = (word ^ word >> shift) * factor & _WORD
    return word ^ word >> 16


def _signed(word: int) -> int:
    """Returns the int32 with the same bits."""
    return word - (word >> 31 << 32)
