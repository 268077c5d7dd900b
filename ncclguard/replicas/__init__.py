"""Replicas of a model compared, bit by bit: who differs, where, and how to have them alike again."""

from ncclguard.replicas.check import Difference, ReplicaReport, check_replicas

__all__ = ["Difference", "ReplicaReport", "check_replicas"]
