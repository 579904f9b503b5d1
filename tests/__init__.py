"""Tests of cachemgr."""
