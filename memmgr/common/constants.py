"""The constants that the pager's C++ has, too. Written by `make stub` from allocator/pager/base/constants.def."""

import enum


class Escape(enum.IntEnum):
    """Why an address may not change any more (rule 9)."""

    NONE = 0
    POINTER = 1
    NUMPY = 2
    DLPACK = 3
    SHARED = 4
    SLICE = 5
    FOREIGN_WRITE = 6
    CAPTURED = 7
    SIZES = 8
    OLDER_ADDRESS = 9


class Order(enum.IntEnum):
    """The order in which malloc evicts when it has to choose by itself."""

    DTR = 0
    LRU = 1
    LARGEST = 2
    DELTA = 3
    RANKED = 4


class Purpose(enum.IntEnum):
    """The program's use of a cell, if it was set (`set_purpose`)."""

    OTHER = 0
    PARAMETERS = 1
    GRADIENTS = 2
    OPTIMIZER_STATES = 3


class Absence(enum.IntEnum):
    """Where the bytes of a cell are."""

    RESIDENT = 0
    OFFLOADED = 1
    EVICTED = 2
    PACKED = 3


class Way(enum.IntEnum):
    """The eviction method to use where both are possible. Otherwise the possible one is used."""

    CHEAPER = 0
    EVICT = 1
    OFFLOAD = 2


class EvictedFor(enum.IntEnum):
    """The cause of a cell's last eviction."""

    NONE = 0
    REQUEST = 1
    CONTIGUITY = 2
    PLAN = 3
    READ_AHEAD = 4
    AFTER_OP = 5
    ARGUMENT = 6
    BY_NAME = 7


class Lines(enum.IntEnum):
    """The ops whose large results are recorded with their source lines."""

    OF_NONE = 0
    OF_MARKED_OPS = 1
    OF_ALL = 2


class Row(enum.IntEnum):
    """The kinds of a plan's actions."""

    MAKE = 0
    DROP = 1
    OFFLOAD = 2
    USED = 3


class Event(enum.IntEnum):
    """Events that observers count."""

    EVICT = 0
    OFFLOAD = 1
    RELOAD = 2
    RECOMPUTE = 3
    STALL = 4


class Stretch(enum.IntEnum):
    """States of a stretch of the address space, in the order of `memory_map`'s columns."""

    FREE = 0
    FIXED = 1
    EVICTABLE = 2
    LEAVING = 3
    HOLE = 4


TOUCH_WRITES = 1
TOUCH_MAKES = 2
TOUCH_RECIPE = 4
TOUCH_FIRST = 8
TOUCH_COMES = 16
BEFORE = 2147483648
DISPATCH_KEY = "Fake"
PACK_SECONDS_PER_BYTE = 1e-10
ARGUMENT_READ = "r"
ARGUMENT_WRITTEN = "w"
ARGUMENT_NUMBER = "-"
MEMORY_MAPPED = 0
MEMORY_PLAIN = 1
