import Foundation

/// What `manifest.json` beside an exported package says; see `ssmlx/exported/manifest.py`.
public struct Manifest: Decodable, Sendable {
    public struct Tree: Decodable, Sendable {
        /// K, candidates of each stream.
        let numCandidates: Int
        /// Nodes of a tree, the likeliest.
        let size: Int
        /// Children of a node, its likeliest; none for all K.
        let width: Int?
        /// Whether candidates are scored given the token before them; none in the first format.
        let isConditional: Bool?
    }

    static let supportedFormats = ["ssmlx-export/2", "ssmlx-export/1"]

    let format: String
    let target: String
    let dtype: String
    let cache: String
    /// S, tokens that the cache has room for.
    let numSlots: Int
    /// T, tokens of a prompt chunk.
    let chunk: Int
    /// N, rows of a decode step.
    let numNodes: Int
    let tree: Tree
    let promptTemplate: String?
    let endTokenIds: [Int]

    /// Reads the manifest in an export's folder, and refuses what this loop cannot drive.
    static func read(from folder: URL) throws -> Manifest {
        let data = try Data(contentsOf: folder.appending(path: "manifest.json"))
        let decoder = JSONDecoder()
        decoder.keyDecodingStrategy = .convertFromSnakeCase
        let manifest = try decoder.decode(Manifest.self, from: data)
        guard supportedFormats.contains(manifest.format) else {
            throw ExportError.mismatch("format \(manifest.format), expected \(supportedFormats[0])")
        }
        guard manifest.target == "coreml", manifest.cache == "state", manifest.dtype == "float16"
        else {
            throw ExportError.mismatch(
                "target \(manifest.target), cache \(manifest.cache), \(manifest.dtype); expected a "
                    + "float16 Core ML export: python -m ssmlx.export --target coreml")
        }
        return manifest
    }
}

public enum ExportError: Error, CustomStringConvertible {
    case mismatch(String)
    case contextIsFull
    case missingOutput(String)

    public var description: String {
        switch self {
        case .mismatch(let found): "the exported folder does not fit: \(found)"
        case .contextIsFull: "the prompt leaves no room for an answer"
        case .missingOutput(let name): "the model gave no \(name)"
        }
    }
}
