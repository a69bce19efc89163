"""The whole configuration: one tree of frozen values, one loader, one linter.

    schema             the members of the file, and their documentation
    loader             a file, the environment and flags -> one Config, or every problem at once
    convert            plain values -> the schema
    presets            collections of Parquet in few words
    validation         rules beyond types
    plugin_validation  the rules of projections and events
    overlaps           templates that share keys, and projections, by which others could read or write
    key_templates      key templates
    routes             the routes that a configuration makes
    derived            what follows from several members: an action's limit, the coordinator, media types
    lint               settings that are accepted and probably not meant
    report             the output of `pysync check`

The environment is read here and nowhere else. `lint` and `report` are imported by the commands
that need them.

See docs/reference/configuration.md.
"""

from pysync.config.derived import (
    S3Location,
    Trust,
    database_paths,
    effective_coordinator,
    effective_limit,
    every_named_identity,
    every_role,
    every_trusted_issuer,
    is_multi_process,
    redacted_coordinator,
    s3_location,
    trust_of,
)
from pysync.config.loader import load, parse
from pysync.config.problem import ConfigError, Problem
from pysync.config.schema import (
    Action,
    AppendOnly,
    Auth,
    ChangeRetention,
    Collection,
    Config,
    ConfigEndpoint,
    Cors,
    Encryption,
    EventsConfig,
    FieldPermission,
    Limit,
    Namespace,
    ProjectionConfig,
    RateLimit,
    RateLimitKey,
    RateRule,
    Restriction,
    ScrubConfig,
    Server,
    SpacesConfig,
    StoreConfig,
)

__all__ = [
    "Action",
    "AppendOnly",
    "Auth",
    "ChangeRetention",
    "Collection",
    "Config",
    "ConfigEndpoint",
    "ConfigError",
    "Cors",
    "Encryption",
    "EventsConfig",
    "FieldPermission",
    "Limit",
    "Namespace",
    "Problem",
    "ProjectionConfig",
    "RateLimit",
    "RateLimitKey",
    "RateRule",
    "Restriction",
    "S3Location",
    "ScrubConfig",
    "Server",
    "SpacesConfig",
    "StoreConfig",
    "Trust",
    "database_paths",
    "effective_coordinator",
    "effective_limit",
    "every_named_identity",
    "every_role",
    "every_trusted_issuer",
    "is_multi_process",
    "load",
    "parse",
    "redacted_coordinator",
    "s3_location",
    "trust_of",
]
