"""A deterministic simulation of servers and clients: one seed decides time, network, disks and threads."""

from rmqkit.testing.simulation.cluster import BrokerServer, Cluster, NameServerServer, Server
from rmqkit.testing.simulation.world import Machine, Process, ProcessDied, World

__all__ = ["BrokerServer", "Cluster", "Machine", "NameServerServer", "Process", "ProcessDied", "Server", "World"]
