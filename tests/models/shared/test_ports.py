"""Ports that are asked for together are different ones."""

from megadit.models.shared.addresses import free_ports


def test_ports_differ():
    """One at a time, some of so many would come twice."""
    assert len(set(free_ports(500))) == 500
