"""Pruning: what goes from a store or from live directories, first as a plan that changes nothing, then the deed.

A plan is a frozen value: what goes, why, and how many bytes and files that frees. The deed does no more than its plan
says, and looks again at what may have changed since: pins, leases, what is open, how old a layer is. Every deed can be
killed anywhere, and any number may run at once, beside launches.
"""
