"""Tensors of a device whose memory is the host's."""

import gc
import io
import weakref

import torch
from memo_runtime.host_store import HostStore
from memo_runtime.host_tensors import HostPlace, _Stores, host_tensor, place_of


def test_a_parameter_lies_in_host_memory_and_keeps_its_layout():
    parameter = torch.nn.Parameter(torch.randn(64, 32).t())
    values = parameter.detach().clone()
    store = HostStore("shm", 2**20)
    parameter.data = host_tensor(store, 4096, parameter).copy_(values)
    assert torch.equal(parameter, values)
    assert parameter.stride() == values.stride()
    place = place_of(parameter.t()[3])
    assert place is not None
    assert place.store is store
    assert place.offset_bytes == 4096 + 3 * 32 * 4
    store.bytes(4, 4096).view(torch.float32).fill_(7.0)
    assert parameter[0, 0] == 7.0


def test_other_tensors_have_no_place():
    store = HostStore("shm", 4096)
    held = host_tensor(store, 0, torch.ones(4))
    assert place_of(torch.ones(4)) is None
    assert place_of(held) is not None
    assert place_of(torch.empty(0)) is None


def test_memory_lives_as_long_as_the_tensor():
    store = HostStore("shm", 4096)
    held = host_tensor(store, 0, torch.ones(4)).fill_(3.0)
    seen = weakref.ref(store)
    del store
    gc.collect()
    assert seen() is not None
    assert held.tolist() == [3.0] * 4
    del held
    gc.collect()
    assert seen() is None


def test_a_saved_tensor_is_as_large_as_itself():
    held = host_tensor(HostStore("shm", 2**24), 0, torch.ones(4))
    file = io.BytesIO()
    torch.save(held, file)
    assert len(file.getvalue()) < 2**16


def test_a_store_that_has_gone_hides_none_that_lies_around_it():
    stores, live, gone = _Stores(), HostStore("shm", 2**16), HostStore("shm", 4096)
    start = live.bytes(1).data_ptr()
    stores.add(live)
    stores._by_address[start + 4096] = weakref.ref(gone)
    stores._addresses = sorted(stores._by_address)
    del gone
    gc.collect()
    assert stores.place_at(start + 8192) == HostPlace(store=live, offset_bytes=8192)
