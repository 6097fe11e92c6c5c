"""A cache of answers: the same request first, then one that means the same, and a promise about wrong hits."""

from selfspec_cli.gateway.cache.answers import AnswerCache
from selfspec_cli.gateway.cache.desk import Hit
from selfspec_cli.gateway.cache.request import CacheRequest

__all__ = ["AnswerCache", "CacheRequest", "Hit"]
