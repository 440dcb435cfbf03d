"""Where rows live, behind one small interface (`Store`): gather, update, flush, close, bytes held.

store = open_store(cfg, layer)
values_nW = store.gather(ids_n); store.update(ids_U, values_UW)
"""

from engram.stores.base import Store, TableSpec, initial_rows
from engram.stores.device import DeviceStore
from engram.stores.disk import DiskStore
from engram.stores.host import HostStore, PinnedStore
from engram.stores.opening import DeferredDiskStore

__all__ = [
    "DeferredDiskStore",
    "DeviceStore",
    "DiskStore",
    "HostStore",
    "PinnedStore",
    "Store",
    "TableSpec",
    "initial_rows",
]
