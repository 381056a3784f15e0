//! Pure: (config, inventory, addresses, health, host) → exact contents of the maps.

pub mod model;
