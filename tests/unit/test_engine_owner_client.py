"""Whatever happens to the connection, a caller hears `OwnerLost`: that is what makes it try the next owner."""

from __future__ import annotations

import socket

import pytest

from belayer.engine.owner.client import OwnerClient
from belayer.errors import OwnerLost

pytestmark = pytest.mark.unit


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    yield OwnerClient(ours, timeout_s=0.05), theirs
    ours.close()
    theirs.close()


def test_an_owner_that_is_gone(pair):
    client, theirs = pair
    theirs.close()
    with pytest.raises(OwnerLost):
        client.state()


def test_an_owner_that_does_not_answer(pair):
    client, _theirs = pair
    with pytest.raises(OwnerLost):
        client.state()
    with pytest.raises(OwnerLost):  # a late answer would be taken for the answer to this
        client.state()


def test_an_owner_that_is_replaced_while_an_update_writes(pair):
    """The update's thread asks for the commit after the driver has closed the dead owner's connection."""
    client, _theirs = pair
    client.close()
    with pytest.raises(OwnerLost):
        client.commit(1, "digest", 1)
