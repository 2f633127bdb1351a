"""Which pages of a cache hold which sequence: kept on the host, once for the caches of all layers. Needs no framework.

A pool lends pages; a sequence holds them. What `pages` says is copied to the device by `CachedSequences.assign`.
"""


class OutOfPages(RuntimeError):
    """A pool has fewer free pages than a sequence asks for. Nothing was allocated.

    Attributes:
        wanted: how many pages it asks for.
        free: how many are free.
        num_pages: how many there are.
    """

    def __init__(self, wanted: int, free: int, num_pages: int):
        super().__init__(wanted, free, num_pages)
        self.wanted, self.free, self.num_pages = wanted, free, num_pages

    def __str__(self) -> str:
        return f"{self.wanted} pages are wanted, but only {self.free} of {self.num_pages} are free: free some sequences"


class PagePool:
    """The pages of a cache, each free or held by one sequence or several.

    Attributes:
        num_pages: how many pages there are, 0 to num_pages - 1.
        page_size: slots of a page; a slot has room for one key and its value.
    """

    def __init__(self, num_pages: int, page_size: int):
        """
        Args:
            num_pages: the first dimension of every layer's k and v.
            page_size: the second one.

        Raises:
            ValueError: one of them is not positive.
        """
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} = {value}: must be 1 or more")
        self.num_pages, self.page_size = num_pages, page_size
        self._holders = [0] * num_pages
        self._free = list(range(num_pages))[::-1]  # the last one is lent next

    @property
    def num_free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    def pages_for(self, length: int) -> int:
        """How many pages `length` slots take that are shared with nobody."""
        return -(-length // self.page_size)

    def holders(self, page: int) -> int:
        """How many sequences hold a page; 0 if it is free.

        Raises:
            ValueError: there is no such page.
        """
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page = {page}: must lie in [0, {self.num_pages})")
        return self._holders[page]

    def _allocate(self, count: int) -> list[int]:
        if count > len(self._free):
            raise OutOfPages(count, len(self._free), self.num_pages)
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def _hold(self, pages: list[int]) -> None:
        for page in pages:
            self._holders[page] += 1

    def _release(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)


class PagedSequence:
    """The pages that hold one sequence: slot s is slot s % page_size of page pages[s // page_size].

    Attributes:
        pool: where the pages come from.
        pages: the numbers of its pages, in order.
        length: its slots. They need not be filled yet.
    """

    def __init__(self, pool: PagePool):
        """A sequence without slots, which holds no page."""
        self.pool = pool
        self.pages: list[int] = []
        self.length = 0

    def extend(self, added: int) -> list[tuple[int, int]]:
        """Makes room for `added` more slots that this sequence alone may write.

        A last page that is partly filled and held by others, too, is replaced by one of its own.

        Args:
            added: slots; 0 changes nothing.

        Returns:
            Pairs (source, target) of pages whose content must be copied in every layer, by `KVCache.copy_pages`, before
            anything is appended to any sequence: at most one pair.

        Raises:
            OutOfPages: there are too few free pages; nothing was changed.
            ValueError: added is negative.
        """
        if added < 0:
            raise ValueError(f"added = {added}: must be 0 or more")
        if added == 0:
            return []
        pool = self.pool
        shared = self.length % pool.page_size > 0 and pool.holders(self.pages[-1]) > 1
        new = pool._allocate(pool.pages_for(self.length + added) - len(self.pages) + shared)
        copies = []
        if shared:
            copies.append((self.pages[-1], new[0]))
            pool._release([self.pages.pop()])
        self.pages += new
        self.length += added
        return copies

    def fork(self, length: int | None = None) -> "PagedSequence":
        """A sequence that shares this one's first `length` slots; None: all of them. It takes no page.

        Both may be extended, truncated and freed from then on: neither sees what the other appends.

        Raises:
            ValueError: there are not so many slots.
        """
        length = self._within(self.length if length is None else length)
        child = PagedSequence(self.pool)
        child.pages, child.length = self.pages[: self.pool.pages_for(length)], length
        self.pool._hold(child.pages)
        return child

    def truncate(self, length: int) -> None:
        """Keeps the first `length` slots, and frees the pages that hold none of them.

        Raises:
            ValueError: there are not so many slots.
        """
        self.length = self._within(length)
        kept = self.pool.pages_for(length)
        self.pool._release(self.pages[kept:])
        del self.pages[kept:]

    def free(self) -> None:
        """Gives all pages back; those that others hold, too, stay with them. The sequence is as a new one."""
        self.truncate(0)

    def _within(self, length: int) -> int:
        if not 0 <= length <= self.length:
            raise ValueError(f"length = {length}: must lie in [0, {self.length}], the slots of this sequence")
        return length
