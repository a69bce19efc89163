"""The whole configuration: one tree of frozen values, one loader, one linter (wire section 10).

    schema             the members of the file, and their documentation
    loader             a file, the environment and flags -> one Config, or every problem at once
    convert            plain values -> the schema
    presets            collections of Parquet in few words
    validation         rules beyond types
    plugin_validation  the rules of projections and events
    overlaps           templates that share keys, and projections, by which others could read or write
    key_templates      key templates
    derived            what follows from several members: an action's limit, the coordinator, media types
    lint               settings that are accepted and probably not meant
    report             the output of `pysync check`
    reference          docs/configuration.md, made from the schema

The environment is read here and nowhere else. `lint`, `report` and `reference` are for people: they are
imported by the commands that need them.
"""

from pysync.config.derived import (
    S3Place,
    Trust,
    database_paths,
    effective_coordinator,
    effective_limit,
    every_named_identity,
    every_role,
    every_trusted_issuer,
    is_shared,
    s3_place,
    shown_coordinator,
    trust_of,
)
from pysync.config.loader import load, parse
from pysync.config.problem import ConfigError, Problem
from pysync.config.schema import (
    Action,
    AppendOnly,
    Auth,
    Bucket,
    ChangesKept,
    Collection,
    Config,
    ConfigEndpoint,
    Cors,
    Encryption,
    EventsPlugin,
    FieldPermission,
    Limit,
    Namespace,
    Projection,
    RateLimit,
    RateRule,
    Restriction,
    ScrubConfig,
    Server,
    Spaces,
    StoreConfig,
)

__all__ = [
    "Action",
    "AppendOnly",
    "Auth",
    "Bucket",
    "ChangesKept",
    "Collection",
    "Config",
    "ConfigEndpoint",
    "ConfigError",
    "Cors",
    "Encryption",
    "EventsPlugin",
    "FieldPermission",
    "Limit",
    "Namespace",
    "Problem",
    "Projection",
    "RateLimit",
    "RateRule",
    "Restriction",
    "S3Place",
    "ScrubConfig",
    "Server",
    "Spaces",
    "StoreConfig",
    "Trust",
    "database_paths",
    "effective_coordinator",
    "effective_limit",
    "every_named_identity",
    "every_role",
    "every_trusted_issuer",
    "is_shared",
    "load",
    "parse",
    "s3_place",
    "shown_coordinator",
    "trust_of",
]
