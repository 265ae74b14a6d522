//! Types of a kernel by its BTF (Documentation/bpf/btf.rst): offsets, sizes, enum values.
//!
//! A vmlinux is hostile input. The section is gone through once, which shows that every type lies inside of it; nothing is
//! copied, and lookups follow references for a limited number of steps.

use std::collections::HashMap;

use super::ImageError;

/// Larger type information is refused: a distribution kernel with every driver built in has 10 MiB.
pub(super) const BTF_MAX_BYTES: usize = 64 << 20;
/// Structures inside structures, and names for names, are followed this deep.
const DEPTH_MAX: u32 = 16;
/// Members that a lookup looks at; those of struct page are about a hundred.
const MEMBERS_MAX: u32 = 100_000;

const MAGIC: u32 = 0xeb9f;
/// Magic, version and flags; length of the header; offset and length of types, and of strings.
const HEADER_BYTES: usize = 24;
/// Name; kind and count; size or type.
const TYPE_BYTES: usize = 12;

const INT: u32 = 1;
const POINTER: u32 = 2;
const ARRAY: u32 = 3;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const ENUM: u32 = 6;
const TYPEDEF: u32 = 8;
const VOLATILE: u32 = 9;
const CONST: u32 = 10;
const RESTRICT: u32 = 11;
const TYPE_TAG: u32 = 18;
const ENUM64: u32 = 19;

/// Type information.
pub(super) struct Btf<'a> {
    types: &'a [u8],
    strings: &'a [u8],
    /// Where each type begins; the first is that of number 1.
    starts: Vec<u32>,
    /// The first structure, and the first enumeration, of each name.
    structures: HashMap<&'a [u8], u32>,
    enumerations: HashMap<&'a [u8], u32>,
}

/// A member of a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Field {
    /// Offset from the start of the structure in bytes.
    pub(super) offset: usize,
    type_id: u32,
}

/// The fixed part of a type, and where its members begin.
#[derive(Clone, Copy)]
struct Type {
    name: u32,
    kind: u32,
    count: u32,
    flag: bool,
    size_or_type: u32,
    rest: usize,
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Bytes behind the fixed part of a type.
fn rest_bytes(kind: u32, count: u32) -> Option<usize> {
    let each = |bytes: usize| Some(count as usize * bytes);
    match kind {
        // int, variable, declaration tag
        INT | 14 | 17 => Some(4),
        // pointer, forward, function, float
        POINTER | 7 | TYPEDEF..=RESTRICT | 12 | 16 | TYPE_TAG => Some(0),
        ARRAY => Some(12),
        // data section
        STRUCT | UNION | 15 | ENUM64 => each(12),
        // function prototype
        ENUM | 13 => each(8),
        _ => None,
    }
}

impl<'a> Btf<'a> {
    /// Goes through the bytes of a `.BTF` section.
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self, ImageError> {
        let bad = |what: &str| ImageError::Btf(what.to_owned());
        let header = |index: usize| word(bytes, index * 4).ok_or_else(|| bad("it has no header"));
        if bytes.len() > BTF_MAX_BYTES {
            return Err(bad("it is too large"));
        }
        if header(0)? & 0xff_ffff != MAGIC | 1 << 16 {
            return Err(bad("it is of another version, or of another byte order"));
        }
        let start = header(1)? as usize;
        let part = |offset: usize, len: u32| {
            let offset = start.checked_add(offset)?;
            bytes.get(offset..offset.checked_add(len as usize)?)
        };
        let outside = || bad("its parts lie outside of it");
        if start < HEADER_BYTES {
            return Err(outside());
        }
        let types = part(header(2)? as usize, header(3)?).ok_or_else(outside)?;
        let strings = part(header(4)? as usize, header(5)?).ok_or_else(outside)?;
        let mut btf = Self {
            types,
            strings,
            starts: Vec::new(),
            structures: HashMap::new(),
            enumerations: HashMap::new(),
        };
        let mut at = 0;
        while at < types.len() {
            let found = btf.type_at(at).ok_or_else(|| bad("a type is cut off"))?;
            let rest = rest_bytes(found.kind, found.count);
            let rest = rest.ok_or_else(|| bad(&format!("kind {} of a type is unknown", found.kind)))?;
            let end = found.rest.checked_add(rest).filter(|end| *end <= types.len());
            btf.starts.push(at as u32);
            let id = btf.starts.len() as u32;
            let names = match found.kind {
                STRUCT => Some(&mut btf.structures),
                ENUM => Some(&mut btf.enumerations),
                _ => None,
            };
            if let Some(names) = names {
                names.entry(string(strings, found.name)).or_insert(id);
            }
            at = end.ok_or_else(|| bad("a type is cut off"))?;
        }
        Ok(btf)
    }

    fn type_at(&self, at: usize) -> Option<Type> {
        let info = word(self.types, at + 4)?;
        Some(Type {
            name: word(self.types, at)?,
            kind: info >> 24 & 31,
            count: info & 0xffff,
            flag: info >> 31 == 1,
            size_or_type: word(self.types, at + 8)?,
            rest: at + TYPE_BYTES,
        })
    }

    fn get(&self, id: u32) -> Option<Type> {
        self.type_at(*self.starts.get(id.checked_sub(1)? as usize)? as usize)
    }

    /// A word of what lies behind the fixed part.
    fn rest(&self, of: Type, index: usize) -> Option<u32> {
        word(self.types, of.rest + index * 4)
    }

    fn structure(&self, name: &str) -> Option<u32> {
        self.structures.get(name.as_bytes()).copied()
    }

    /// Whether there is a structure of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.structure(name).is_some()
    }

    /// Size of a structure in bytes.
    pub(super) fn size(&self, name: &str) -> Result<usize, ImageError> {
        let found = self.structure(name).and_then(|id| self.get(id));
        let found = found.ok_or_else(|| ImageError::MissingType(format!("struct {name}")))?;
        Ok(found.size_or_type as usize)
    }

    fn size_of(&self, id: u32, depth: u32) -> Option<usize> {
        if depth > DEPTH_MAX {
            return None;
        }
        let found = self.get(id)?;
        match found.kind {
            STRUCT | UNION | INT | ENUM | ENUM64 => Some(found.size_or_type as usize),
            POINTER => Some(8),
            ARRAY => {
                let one = self.size_of(self.rest(found, 0)?, depth + 1)?;
                one.checked_mul(self.rest(found, 2)? as usize)
            }
            _ => self.size_of(behind(found)?, depth + 1),
        }
    }

    /// What a type is behind its names and qualifiers.
    fn resolved(&self, id: u32) -> Option<Type> {
        let mut found = self.get(id)?;
        for _ in 0..DEPTH_MAX {
            match behind(found) {
                Some(next) => found = self.get(next)?,
                None => return Some(found),
            }
        }
        None
    }

    /// A member by name, also one inside members without a name.
    fn member(&self, id: u32, name: &str, depth: u32, budget: &mut u32) -> Option<Field> {
        if depth > DEPTH_MAX {
            return None;
        }
        let found = self.resolved(id).filter(|found| matches!(found.kind, STRUCT | UNION))?;
        for index in 0..found.count as usize {
            *budget = budget.checked_sub(1)?;
            let [member, type_id, bits] = [0, 1, 2].map(|word| self.rest(found, index * 3 + word));
            let (member, type_id, bits) = (member?, type_id?, bits?);
            // The top byte is then the size of a bit field, of which there is none to look up.
            if bits % 8 != 0 || found.flag && bits >> 24 != 0 {
                continue;
            }
            let offset = bits as usize / 8;
            match string(self.strings, member) {
                b"" => {
                    if let Some(inner) = self.member(type_id, name, depth + 1, budget) {
                        return Some(Field { offset: offset.checked_add(inner.offset)?, ..inner });
                    }
                }
                known if known == name.as_bytes() => return Some(Field { offset, type_id }),
                _ => {}
            }
        }
        None
    }

    /// The member at `path`, for example `vm_stat` or `flags.f`, where the kernel has it.
    pub(super) fn find(&self, structure: &str, path: &str) -> Option<Field> {
        let mut field = Field { offset: 0, type_id: self.structure(structure)? };
        let mut budget = MEMBERS_MAX;
        for name in path.split('.') {
            let inner = self.member(field.type_id, name, 0, &mut budget)?;
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
        let found = self.resolved(field.type_id).filter(|found| found.kind == ARRAY)?;
        Some((self.rest(found, 2)? as usize, self.size_of(self.rest(found, 0)?, 0)?))
    }

    /// Names and values of an enumeration.
    pub(super) fn enumeration(&self, name: &str) -> Option<Vec<(String, i64)>> {
        let found = self.get(*self.enumerations.get(name.as_bytes())?)?;
        let value = |index: usize| {
            let name = string(self.strings, self.rest(found, index * 2)?);
            let value = self.rest(found, index * 2 + 1)?;
            let value = if found.flag { value.cast_signed().into() } else { value.into() };
            Some((String::from_utf8_lossy(name).into_owned(), value))
        };
        (0..found.count as usize).map(value).collect()
    }
}

/// What a name, or a qualifier, stands for.
fn behind(of: Type) -> Option<u32> {
    matches!(of.kind, TYPEDEF | CONST | VOLATILE | RESTRICT | TYPE_TAG).then_some(of.size_or_type)
}

/// The string at an offset, empty where there is none.
pub(super) fn string(strings: &[u8], offset: u32) -> &[u8] {
    let rest = strings.get(offset as usize..).unwrap_or_default();
    rest.split(|byte| *byte == 0).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::{State, fake};
    use super::*;

    #[test]
    fn members_are_found_by_name_behind_typedefs_and_without_one() {
        let bytes = fake::btf();
        let btf = Btf::parse(&bytes).expect("type information");
        assert_eq!(btf.find("page", "_refcount").map(|field| field.offset), Some(52));
        assert_eq!(btf.find("page", "lru.prev").map(|field| field.offset), Some(16));
        assert_eq!(btf.find("page", "no_such"), None);
        let areas = btf.find("zone", "free_area").expect("an array");
        assert_eq!(btf.array(areas), Some((11, btf.size("free_area").expect("a size"))));
        assert_eq!(btf.enumeration("zone_type").expect("an enumeration")[1], ("ZONE_NORMAL".to_owned(), 1));
    }

    /// Not one byte of it may be needed that is not looked at first.
    #[test]
    fn cut_type_information_is_refused() {
        let whole = fake::btf();
        for len in 0..whole.len() {
            assert!(Btf::parse(&whole[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn a_structure_that_holds_itself_many_times_is_given_up() {
        // One structure with 1000 nameless members of its own type: sixteen levels of it would take forever.
        let mut types = vec![1, STRUCT << 24 | 1000, 8];
        types.extend([0, 1, 0].repeat(1000));
        let strings = b"\0page\0\0\0";
        let bytes = types.len() as u32 * 4;
        let header = [MAGIC | 1 << 16, 24, 0, bytes, bytes, strings.len() as u32];
        let mut btf: Vec<u8> = header.iter().chain(&types).flat_map(|word| word.to_le_bytes()).collect();
        btf.extend(strings);
        let parsed = Btf::parse(&btf).expect("it is well formed");
        assert!(parsed.has("page") && parsed.find("page", "flags").is_none());
    }

    #[test]
    fn no_altered_byte_makes_it_panic() {
        let image = fake::image(16);
        let ram = image.ram().expect("RAM");
        for at in 0..image.btf().len() {
            for flip in [0x10, 0xff] {
                let mut bytes = image.btf().to_vec();
                bytes[at] ^= flip;
                if let Ok(kernel) = image.kernel(Some(&bytes)) {
                    let _ = State::read(&kernel, &ram);
                }
            }
        }
    }
}
