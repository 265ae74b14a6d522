//! Types of a kernel by its BTF: offsets, sizes, enum values.
//!
//! btfparse reads the section; the lookups are here because its own follow cycles of types without a limit, and a vmlinux
//! is hostile input.

use btfparse::{Error, ErrorKind, Integer32Value, Offset, Readable, TypeInformation, TypeVariant};

use super::ImageError;

/// Larger type information is refused: a distribution kernel with every driver built in has 10 MiB.
pub(super) const BTF_MAX_BYTES: usize = 64 << 20;
/// Structures inside structures, and names for names, are followed this deep.
const DEPTH_MAX: u32 = 16;

/// Parsed BTF.
pub(super) struct Btf {
    types: TypeInformation,
}

/// A member of a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Field {
    /// Offset from the start of the structure in bytes.
    pub(super) offset: usize,
    type_id: u32,
}

struct Bytes<'a>(&'a [u8]);

impl Readable for Bytes<'_> {
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), Error> {
        let range =
            usize::try_from(offset).ok().and_then(|start| Some(start..start.checked_add(buffer.len())?));
        let bytes = range.and_then(|range| self.0.get(range));
        let bytes = bytes.ok_or_else(|| Error::new(ErrorKind::IOError, "out of bounds"))?;
        buffer.copy_from_slice(bytes);
        Ok(())
    }
}

impl Btf {
    /// Parses the bytes of a `.BTF` section.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, ImageError> {
        let types =
            TypeInformation::new(&Bytes(bytes)).map_err(|error| ImageError::Btf(format!("{error:?}")))?;
        Ok(Self { types })
    }

    fn get(&self, id: u32) -> Option<&TypeVariant> {
        self.types.get().get(&id)
    }

    /// The structure of this name. BTF may hold functions and structures of one name, so `id_of` alone will not do.
    fn structure(&self, name: &str) -> Option<u32> {
        let is_structure = |id: &u32| matches!(self.get(*id), Some(TypeVariant::Struct(_)));
        self.types.id_of(name).filter(is_structure).or_else(|| {
            let named = |variant: &TypeVariant| {
                matches!(variant, TypeVariant::Struct(found) if found.name().as_deref() == Some(name))
            };
            self.types.get().iter().find(|(_, variant)| named(variant)).map(|(id, _)| *id)
        })
    }

    /// Whether there is a structure of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.structure(name).is_some()
    }

    /// Size of a structure in bytes.
    pub(super) fn size(&self, name: &str) -> Result<usize, ImageError> {
        let id = self.structure(name).ok_or_else(|| ImageError::MissingType(format!("struct {name}")))?;
        self.size_of(id, 0).ok_or_else(|| ImageError::MissingType(format!("the size of struct {name}")))
    }

    fn size_of(&self, id: u32, depth: u32) -> Option<usize> {
        if depth > DEPTH_MAX {
            return None;
        }
        match self.get(id)? {
            TypeVariant::Struct(found) => Some(*found.size()),
            TypeVariant::Union(found) => Some(*found.size()),
            TypeVariant::Int(found) => Some(*found.size()),
            TypeVariant::Enum(found) => Some(*found.size()),
            TypeVariant::Ptr(_) => Some(8),
            TypeVariant::Array(found) => {
                let one = self.size_of(*found.element_tid(), depth + 1)?;
                one.checked_mul(*found.element_count() as usize)
            }
            _ => self.size_of(self.behind(id)?, depth + 1),
        }
    }

    /// What a name, or a qualifier, stands for.
    fn behind(&self, id: u32) -> Option<u32> {
        match self.get(id)? {
            TypeVariant::Typedef(found) => Some(*found.tid()),
            TypeVariant::Const(found) => Some(*found.tid()),
            TypeVariant::Volatile(found) => Some(*found.tid()),
            TypeVariant::Restrict(found) => Some(*found.tid()),
            TypeVariant::TypeTag(found) => Some(*found.tid()),
            _ => None,
        }
    }

    fn resolved(&self, mut id: u32) -> Option<&TypeVariant> {
        for _ in 0..DEPTH_MAX {
            match self.behind(id) {
                Some(next) => id = next,
                None => return self.get(id),
            }
        }
        None
    }

    /// A member by name, also one inside members without a name.
    fn member(&self, id: u32, name: &str, depth: u32) -> Option<Field> {
        if depth > DEPTH_MAX {
            return None;
        }
        let members = match self.resolved(id)? {
            TypeVariant::Struct(found) => found.member_list(),
            TypeVariant::Union(found) => found.member_list(),
            _ => return None,
        };
        for member in members {
            let Offset::ByteOffset(offset) = member.offset() else { continue };
            let offset = offset as usize;
            match member.name() {
                Some(found) if found == name => return Some(Field { offset, type_id: member.tid() }),
                Some(_) => {}
                None => {
                    if let Some(inner) = self.member(member.tid(), name, depth + 1) {
                        return Some(Field { offset: offset.checked_add(inner.offset)?, ..inner });
                    }
                }
            }
        }
        None
    }

    /// The member at `path`, for example `vm_stat` or `flags.f`, where the kernel has it.
    pub(super) fn find(&self, structure: &str, path: &str) -> Option<Field> {
        let mut field = Field { offset: 0, type_id: self.structure(structure)? };
        for name in path.split('.') {
            let inner = self.member(field.type_id, name, 0)?;
            field = Field { offset: field.offset.checked_add(inner.offset)?, ..inner };
        }
        Some(field)
    }

    /// As [`Btf::find`], for what every kernel must have.
    pub(super) fn field(&self, structure: &str, path: &str) -> Result<Field, ImageError> {
        self.find(structure, path).ok_or_else(|| ImageError::MissingType(format!("{structure}.{path}")))
    }

    /// Size of a member in bytes.
    pub(super) fn size_of_field(&self, field: Field) -> Option<usize> {
        self.size_of(field.type_id, 0)
    }

    /// Number of elements, and size of one in bytes, of a member that is an array.
    pub(super) fn array(&self, field: Field) -> Option<(usize, usize)> {
        match self.resolved(field.type_id)? {
            TypeVariant::Array(found) => {
                Some((*found.element_count() as usize, self.size_of(*found.element_tid(), 0)?))
            }
            _ => None,
        }
    }

    /// Names and values of an enumeration.
    pub(super) fn enumeration(&self, name: &str) -> Option<Vec<(String, i64)>> {
        let of = |variant: &TypeVariant| match variant {
            TypeVariant::Enum(found) if found.name().as_deref() == Some(name) => {
                let value = |value: &Integer32Value| match value {
                    Integer32Value::Signed(value) => i64::from(*value),
                    Integer32Value::Unsigned(value) => i64::from(*value),
                };
                let values = found.named_value_list().iter();
                Some(values.map(|named| (named.name.clone(), value(&named.value))).collect())
            }
            _ => None,
        };
        let first = self.types.id_of(name).and_then(|id| of(self.get(id)?));
        first.or_else(|| self.types.get().values().find_map(of))
    }
}
