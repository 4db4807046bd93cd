"""Pages of the KV-cache, and places for states, as the host counts them."""

from collections.abc import Sequence


class PagePool:
    """Pages 0 to count - 1 with reference counts; a page is free at count zero."""

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, number: int) -> list[int]:
        """`number` free pages, each with one reference.

        Raises:
          RuntimeError: fewer are free; callers ask `free` first.
        """
        if number > len(self._free):
            raise RuntimeError(f"{number} pages asked for, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(number)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to each of `pages`, which must be in use."""
        for page in pages:
            if not self._references[page]:
                raise RuntimeError(f"page {page} is free and cannot be shared")
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less to each; those that nobody holds are free at once."""
        for page in pages:
            if not self._references[page]:
                raise RuntimeError(f"page {page} was released already")
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)
